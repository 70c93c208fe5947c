"""quest_core.QKClip: after a step the same inputs give at most the threshold."""

import pytest
import torch
from models import Around, encoder, unchanged
from torch import nn

import quest_core


def model(attention=None):
    torch.manual_seed(0)
    made = encoder(heads=2)
    for layer in made.layers:
        nn.init.normal_(layer.self_attn.in_proj_weight, std=2)
    if attention:
        quest_core.inject(made, attention)
    return made


def largest(made, x):
    """The largest logit of each head of the first layer, from its own inputs."""
    with quest_core.Monitor(made.layers[0].self_attn) as monitor:
        made.layers[0].self_attn(x, x, x, need_weights=False)
        return torch.tensor(next(iter(monitor.collect().values()))["max_logit"])


@pytest.mark.parametrize("attention", [None, "quest", "quest+gqa(kv_heads=1)", "standard+sigmoid"])
def test_the_same_inputs_reach_the_threshold_and_no_more(attention):
    made, x = model(attention), torch.randn(3, 5, 16)
    clip = quest_core.QKClip(made, threshold=2)
    made.layers[0].self_attn(x, x, x, need_weights=False)
    factors = clip.step()["layers.0.self_attn"]
    clip.close()
    if attention is None:  # the model has its own attention again
        assert type(made.layers[0].self_attn) is nn.MultiheadAttention
        quest_core.inject(made, "standard")
    after = largest(made, x)
    for factor, top in zip(factors, after.tolist(), strict=True):
        assert top == pytest.approx(2, rel=1e-4) if factor < 1 else top <= 2
    assert min(factors) < 1


def test_heads_below_the_threshold_keep_their_weights():
    made, x = model(), torch.randn(3, 5, 16)
    clip = quest_core.QKClip(made, threshold=1e6)
    made(x)
    with unchanged(made):
        assert clip.step() == {}


@pytest.mark.parametrize(
    ("attention", "threshold", "words"),
    [
        ("qknorm-hs", 100, "where logits grow with the projected queries.*its score changes queries"),
        (None, 0, "threshold is 0"),
        (None, float("nan"), "nan"),
    ],
)
def test_models_and_thresholds_that_cannot_be_clipped_are_named(attention, threshold, words):
    with pytest.raises(quest_core.ConfigError, match=words):
        quest_core.QKClip(model(attention), threshold)


def test_a_model_that_is_one_attention_is_clipped():
    made, x = quest_core.Attention(16, 4, "quest"), 9 * torch.randn(3, 5, 16)
    clip = quest_core.QKClip(made, threshold=0.1)
    made(x)
    assert max(clip.step()["mechanism"]) < 1
    made(x)
    assert all(factor == pytest.approx(1, rel=1e-4) for factor in clip.step().get("mechanism", [1]))


def test_layers_that_share_weights_are_refused():
    made = model()
    made.layers[1].self_attn.in_proj_weight = made.layers[0].self_attn.in_proj_weight
    said = "'layers.0.self_attn' and 'layers.1.self_attn' share param"
    with unchanged(made), pytest.raises(quest_core.UnsupportedError, match=said):
        quest_core.QKClip(made)


def test_an_error_leaves_the_model_as_it_was():
    """The queries of attention that a run found, and those of a family, have no projection that can be scaled."""
    found, x = nn.Sequential(Around()), torch.randn(2, 5, 16)
    quest_core.inject(found, "quest", example=x)
    for made, error in ((found, quest_core.UnsupportedError), (model("linear"), quest_core.ConfigError)):
        with unchanged(made), pytest.raises(error):
            quest_core.QKClip(made)
        quest_core.Monitor(made).remove()  # no other observes it
