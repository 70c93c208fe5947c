"""The suite that every adapter inherits, once per kind of model, and the surfaces of this host."""

from collections.abc import Callable
from typing import Any

import pytest
import stand_in
import torch
from torch import Tensor, nn

import quest_core
from quest_core.hosts import plugins
from quest_core.testing import AdapterConformance
from quest_toy import ToyAdapter


class TestEncoder(AdapterConformance):
    adapter = ToyAdapter()
    sites = 2
    refused = ("linear",)  # the model has dropout, and linear attention has no weights to drop

    def make_model(self) -> nn.Module:
        return stand_in.Model(16, 4, depth=2, attn_drop=0.1)

    def make_inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 7, 16),)

    def make_padded(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Tensor], Tensor]]:
        x, keep = torch.randn(2, 7, 16), torch.ones(2, 7, dtype=torch.bool)
        keep[0, 4:] = False
        return (x, keep), (torch.where(keep[..., None], x, 9.0), keep), lambda out: out[keep]


class TestDecoder(AdapterConformance):
    adapter = ToyAdapter()
    sites = 2
    mechanisms = ("quest", "qknorm", "quest+sigmoid")
    refused = ("linear", "sinkhorn")  # sinkhorn cannot be causal

    def make_model(self) -> nn.Module:
        return stand_in.Model(16, 4, depth=2, num_kv_heads=2, attn_drop=0.1)

    def make_inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 7, 16),)


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+sigmoid", "quest+gqa(kv_heads=1)"])
def test_decoding_equals_the_whole_sequence(attention: str) -> None:
    model = stand_in.Model(16, 4, depth=2, num_kv_heads=2, attention=attention).eval()
    x, cache = torch.randn(2, 7, 16), stand_in.Cache()
    steps = [model(part, cache) for part in (x[:, :4], x[:, 4:5], x[:, 5:6], x[:, 6:])]
    torch.testing.assert_close(torch.cat(steps, 1), model(x))


def test_the_constructor_accepts_attention() -> None:
    model = stand_in.Model(16, 4, depth=2, attention="quest")
    assert str(model.attention_report).startswith("attention=quest in 2 modules")
    with pytest.raises(quest_core.ConfigError, match="did you mean 'quest'"):
        stand_in.Model(16, 4, depth=2, attention="qest")


def test_the_installed_plugin_is_found() -> None:
    assert isinstance(plugins.adapter("toy"), ToyAdapter)
    assert plugins.find("stand_in").problem() == ""
