"""The conformance suite on adapters that need no framework: PyTorch's own, and a loop-back host made for this test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core import Adapter, AttentionConfig, Capabilities, Site
from quest_core.hosts.torch import TorchAdapter
from quest_core.testing import AdapterConformance


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


class InjectedHostAttention(HostAttention):
    """What the loop-back adapter puts in place: the host's parameters, and a mechanism."""

    def __init__(self, stock: HostAttention, config: AttentionConfig) -> None:
        nn.Module.__init__(self)
        self.heads, self.drop, self.qkv, self.proj = stock.heads, stock.drop, stock.qkv, stock.proj
        head_dim = self.qkv.in_features // self.heads
        self.mechanism = quest_core.Mechanism(config, num_heads=self.heads, head_dim=head_dim)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if keep is None else self.mechanism.padding_mask(keep, same_tokens=True)
        out = self.mechanism(q, k, v, attn_mask=mask, dropout_p=self.drop if self.training else 0.0)
        return self.proj(out.transpose(1, 2).flatten(2)), None


class LoopbackAdapter(Adapter):
    name = "loopback"
    capabilities = Capabilities(ordered=False, regroups=False, dropout=True)

    def sites(self, model: nn.Module) -> Iterable[Site]:
        found = [(path, m) for path, m in model.named_modules() if isinstance(m, HostAttention)]
        for path, module in found:
            yield Site(path, module, module.heads, module.qkv.in_features // module.heads, self.capabilities)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        assert isinstance(site.module, HostAttention)
        return InjectedHostAttention(site.module, config)

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
    calibrates = False

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


class _Broken(LoopbackAdapter):
    """An adapter with the worst bug this project can have: it returns the host's own attention."""

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        assert isinstance(site.module, HostAttention)
        silent = InjectedHostAttention(site.module, config)
        silent.forward = lambda *args: HostAttention.forward(silent, *args)  # type: ignore[method-assign]
        return silent


def test_the_suite_catches_a_silent_fallback() -> None:
    suite = TestLoopback()
    suite.adapter = _Broken()  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_every_attention_goes_through_its_mechanism()
    with pytest.raises(AssertionError):
        suite.test_mechanisms_equal_their_reference_inside_the_host()


def test_the_suite_catches_a_wrong_mask() -> None:
    class Masks(LoopbackAdapter):
        def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
            assert isinstance(site.module, HostAttention)
            wrong = InjectedHostAttention(site.module, config)
            right = wrong.forward
            wrong.forward = lambda x, keep=None: right(x, None if keep is None else ~keep)  # type: ignore[method-assign]
            return wrong

    suite = TestLoopback()
    suite.adapter = Masks()  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_padding_never_matters()


def test_small_gradients_do_not_accuse_a_right_adapter() -> None:
    """As of BERT with initializer_range=0.02, where rounding to float32 loses a step of SGD."""

    class Small(TestLoopback):
        def make_model(self) -> nn.Module:
            model = super().make_model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1e-4)
            return model

    Small().test_mechanisms_train()


def test_a_parameter_without_a_gradient_is_named() -> None:
    class Detached(LoopbackAdapter):
        def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
            assert isinstance(site.module, HostAttention)
            wrong = InjectedHostAttention(site.module, config)
            for parameter in wrong.mechanism.parameters():
                parameter.requires_grad_(False)
            return wrong

    suite = TestLoopback()
    suite.adapter = Detached()  # type: ignore[misc]
    with pytest.raises(AssertionError, match="qknorm-hs: layers.0.mechanism.score.log_scale has no gradient"):
        suite.test_mechanisms_train()
