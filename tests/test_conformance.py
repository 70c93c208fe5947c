"""The conformance suite on adapters that need no framework: PyTorch's own, and a loop-back host made for this test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core import Adapter, Capabilities
from quest_core.hosts.adapter import HostAttention as Replacement
from quest_core.hosts.torch import TorchAdapter
from quest_core.projections import Packed
from quest_core.testing import AdapterConformance
from quest_core.testing.conformance import NUMBERS


class TestTorchEncoder(AdapterConformance):
    adapter = TorchAdapter()
    sites = 2

    def make_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def make_inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 7, 16),)

    def make_padded(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Tensor], Tensor]]:
        x, padding = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
        padding[0, 4:] = True
        other = torch.where(padding[..., None], 9.0, x)
        return (x, None, padding), (other, None, padding), lambda out: out[~padding]


class TestTorchEncoderWithoutDropout(TestTorchEncoder):
    """Without dropout on the weights, mechanisms without weights apply too."""

    mechanisms = (*AdapterConformance.mechanisms, "linear", "cosine", "aft-simple", "aft-full", "aft-local")

    def make_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)


class TestTorchDecoder(AdapterConformance):
    """Causal self-attention and cross-attention."""

    adapter = TorchAdapter()
    sites = 4
    mechanisms = tuple(name for name in AdapterConformance.mechanisms if name != "sinkhorn")  # it cannot be causal

    def make_model(self) -> nn.Module:
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, 0.1), 2)

    def make_inputs(self) -> tuple[Any, ...]:
        return (torch.randn(6, 2, 16), torch.randn(5, 2, 16), nn.Transformer.generate_square_subsequent_mask(6))

    def run(self, model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        target, memory, mask = inputs
        return model(target, memory, tgt_mask=mask.to(target.dtype))  # type: ignore[no-any-return]


# --- a host of our own: its attention takes [B, N, E] and returns a tuple, and its config has 'attention' --------


class HostAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.drop = heads, 0.1
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else keep[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, mask, self.drop if self.training else 0.0)
        return self.proj(out.transpose(1, 2).flatten(2)), None


class HostModel(nn.Module):
    config_keys = ("dim", "heads", "depth")

    def __init__(self, **config: Any) -> None:
        super().__init__()
        unknown = set(config) - set(self.config_keys)
        if unknown:
            raise TypeError(f"unknown config keys {unknown}")
        self.layers = nn.ModuleList(HostAttention(config["dim"], config["heads"]) for _ in range(config["depth"]))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = F.layer_norm(x + layer(x, keep)[0], x.shape[-1:])
        return x


class InjectedHostAttention(Replacement, HostAttention):
    """What the loop-back adapter puts in place: the host's parameters, and a mechanism."""

    projections = Packed("qkv")
    capabilities = Capabilities(ordered=False, regroups=False)

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        return {"num_heads": host.heads, "head_dim": host.qkv.in_features // host.heads}

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        return dataclasses.replace(cls.capabilities, dropout=host.drop > 0)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = self.split_packed(self.qkv(x))
        mask = None if keep is None else self.mechanism.padding_mask(keep, same_tokens=True)
        return self.proj(self.attend(q, k, v, mask, dropout_p=self.drop if self.training else 0.0)), None


class LoopbackAdapter(Adapter):
    name = "loopback"
    capabilities = Capabilities(ordered=False, regroups=False, dropout=True)
    replacements: ClassVar[dict[str, type[Replacement]]] = {f"{__name__}.HostAttention": InjectedHostAttention}

    def install(self) -> None:
        if "attention" in HostModel.config_keys:
            return
        HostModel.config_keys += ("attention",)
        build = HostModel.__init__

        def init(model: HostModel, *, attention: Any = None, **config: Any) -> None:
            build(model, **config)
            if attention is not None:
                quest_core.inject(model, attention, adapter=self)

        HostModel.__init__ = init  # type: ignore[method-assign]


class TestLoopback(AdapterConformance):
    adapter = LoopbackAdapter()
    sites = 3
    refused = ("gqa(kv_heads=2)", "quest+mqa")

    def make_model(self) -> nn.Module:
        return HostModel(dim=16, heads=4, depth=3)

    def make_inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 7, 16),)

    def make_padded(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Tensor], Tensor]]:
        x, keep = torch.randn(2, 7, 16), torch.ones(2, 7, dtype=torch.bool)
        keep[0, 4:] = False
        return (x, keep), (torch.where(keep[..., None], x, 9.0), keep), lambda out: out[keep]

    def test_the_native_config_accepts_attention(self) -> None:
        self.adapter.install()
        torch.manual_seed(0)
        model = HostModel(dim=16, heads=4, depth=3, attention="quest")
        assert str(model.attention_report).startswith("attention=quest in 3 modules")
        torch.testing.assert_close(model.eval()(*self.inputs()), self.injected("quest").eval()(*self.inputs()))
        with pytest.raises(quest_core.ConfigError, match="did you mean 'quest'"):
            HostModel(dim=16, heads=4, depth=3, attention="qest")


def loopback(kind: type[Replacement]) -> LoopbackAdapter:
    """An adapter that puts another class in place."""

    class Other(LoopbackAdapter):
        replacements: ClassVar[dict[str, type[Replacement]]] = {f"{__name__}.HostAttention": kind}

    return Other()


def test_the_tests_of_a_variant_exist() -> None:
    assert set(NUMBERS) <= vars(AdapterConformance).keys()


def test_the_suite_catches_a_silent_fallback() -> None:
    class Broken(InjectedHostAttention):
        """The worst bug that this project can have: it returns the host's own attention."""

        forward = HostAttention.forward

    suite = TestLoopback()
    suite.adapter = loopback(Broken)  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_every_attention_goes_through_its_mechanism()
    with pytest.raises(AssertionError):
        suite.test_mechanisms_equal_their_reference_inside_the_host()


def test_the_suite_catches_a_wrong_mask() -> None:
    class Masks(InjectedHostAttention):
        def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, None]:
            return super().forward(x, None if keep is None else ~keep)

    suite = TestLoopback()
    suite.adapter = loopback(Masks)  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_padding_never_matters()


def test_the_suite_catches_parameters_that_do_not_train() -> None:
    class Detached(InjectedHostAttention):
        @classmethod
        def adopt(cls, *arguments: Any, **options: Any) -> Any:
            made = super().adopt(*arguments, **options)
            made.mechanism.requires_grad_(False)
            return made

    suite = TestLoopback()
    suite.adapter = loopback(Detached)  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_parameters_of_a_mechanism_are_frozen_with_the_projections()
