"""quest_core.checkpoints: what a state dict says of each layer's attention, compared with a model."""

from __future__ import annotations

import pytest
from torch import nn

import quest_core
from quest_core.checkpoints import Difference, built_attentions, differences, trained_attentions


def model(*attentions: str | None) -> nn.Sequential:
    """Layers of PyTorch's own attention (None) and of ours."""
    return nn.Sequential(
        *(
            nn.MultiheadAttention(8, 2) if attention is None else quest_core.Attention(8, 2, attention=attention)
            for attention in attentions
        )
    )


def test_a_state_dict_says_what_its_model_has() -> None:
    made = model("quest", None, "qnorm+gqa(kv_heads=1)")
    built = built_attentions(made)
    assert {path: str(config) for path, config in built.items()} == trained_attentions(made.state_dict())
    assert list(built) == ["0.mechanism", "2.mechanism"]
    assert differences(made, made.state_dict()) == []


def test_every_layer_that_differs_is_named() -> None:
    found = differences(model("quest", "quest", "standard", None), model("quest", "qnorm", None, "quest").state_dict())
    assert found is not None
    assert [(layer.path, str(layer.built), layer.trained) for layer in found] == [
        ("1.mechanism", "quest", "qnorm"),
        ("3.mechanism", "standard", "quest"),
    ]
    assert isinstance(found[0], Difference)


@pytest.mark.parametrize("wrapped", ["model", "checkpoint"])
def test_wrappers_names_do_not_count(wrapped: str) -> None:
    inner, outer = model("quest"), nn.Module()
    outer.module = model("quest")
    pair = (outer, inner.state_dict()) if wrapped == "model" else (inner, outer.state_dict())
    assert differences(*pair) == []


def test_copied_weights_say_nothing() -> None:
    made = model("quest")
    assert differences(made, dict(made.state_dict())) is None
    assert trained_attentions({}) is None
