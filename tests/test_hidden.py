"""A key that a mask hides from a query does not change its output, on every route; or the mechanism is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quest_core
from quest_core import Attention, InputError, MultiheadAttention, UnsupportedError, attention
from quest_core.ops import (
    hides_the_future,
)

N = 6
PAST = torch.ones(N, N, dtype=torch.bool).tril()
MASKS = {
    "boolean": PAST,
    "additive": torch.zeros(N, N).masked_fill(~PAST, -math.inf),
    "finfo.min": torch.zeros(N, N).masked_fill(~PAST, torch.finfo(torch.float32).min),
    "a head": PAST.expand(2, 4, N, N),
}
BLIND = ("quest+sinkhorn", "quest+kdgqa(kv_heads=2)", "quest+pgqa(kv_heads=2)")
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def leak(model: nn.Module, **how: object) -> float:
    """By how much tokens from 4 on change the outputs before them."""
    torch.manual_seed(0)
    x = torch.randn(2, N, 32)
    other = torch.cat([x[:, :4], torch.randn(2, N - 4, 32)], 1)
    return float((model(x, **how) - model(other, **how))[:, :4].detach().abs().max())


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **how: object) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x, x, **how) if isinstance(layer, nn.TransformerDecoderLayer) else layer(x, **how))
        return x


def stack(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Stack([Attention(32, 4, name) for _ in range(2)])
    if "elliptical" in name:
        quest_core.chain(model)
    return model.eval()


def injected(kind: type[nn.Module], name: str) -> nn.Module:
    torch.manual_seed(0)
    model = Stack([kind(32, 4, 64, 0.0, batch_first=True) for _ in range(2)])  # type: ignore[call-arg]
    return quest_core.inject(model, name)[0].train()  # in evaluation PyTorch turns masks into nested tensors


@pytest.mark.parametrize("kind", LAYERS)
def test_injected_layers_called_directly_do_not_leak(kind: type[nn.Module]) -> None:
    name = "src_mask" if kind is nn.TransformerEncoderLayer else "tgt_mask"
    model = injected(kind, "elliptical")
    if kind is nn.TransformerDecoderLayer:  # its cross-attention sees everything

        def only_self(self: nn.Module, x: Tensor, *_: object, **__: object) -> Tensor:
            return torch.zeros_like(x)

        for layer in model.layers:  # type: ignore[union-attr]
            layer._mha_block = only_self.__get__(layer)
    assert leak(model, **{name: MASKS["additive"]}) == 0


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(32, 96), nn.Linear(32, 32), 4

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return self.out(out.transpose(1, 2).flatten(2))


def universal(name: str, **how: object) -> nn.Module:
    torch.manual_seed(0)
    model = Stack([Plain() for _ in range(2)])
    return quest_core.inject(model, name, example=lambda m: m(torch.randn(2, N, 32), **how))[0]


def test_the_universal_route_does_not_leak() -> None:
    assert leak(universal("elliptical", mask=PAST), mask=PAST) == 0


@pytest.mark.parametrize("name", BLIND)
def test_what_cannot_be_causal_refuses_masks_that_are(name: str) -> None:
    part = name.split("+")[1].split("(")[0]
    q, k, v = torch.randn(3, 2, 4, N, 8)
    k, v = (x[:, : 2 if "gqa" in part else 4] for x in (k, v))
    for mask in MASKS.values():
        with pytest.raises(UnsupportedError, match=f"'{part}' cannot be causal"):
            attention(q, k, v, name, attn_mask=mask)
        with pytest.raises(UnsupportedError, match=f"'{part}' cannot be causal"):
            leak(stack(name), attn_mask=mask)
    x = torch.randn(N, 2, 32)
    for added in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(UnsupportedError, match=f"'{part}' cannot be causal"):
            MultiheadAttention(32, 4, attention=name, **added)(x, x, x, attn_mask=~PAST)
    for kind, key in zip(LAYERS, ("src_mask", "tgt_mask"), strict=True):
        with pytest.raises(UnsupportedError, match=f"'{part}' cannot be causal"):
            leak(injected(kind, name), **{key: MASKS["additive"]})
    if "kv" not in name:
        with pytest.raises(UnsupportedError, match=f"'{part}' cannot be causal"):
            leak(universal(name), mask=PAST)


def test_masks_that_hide_the_future_are_recognized() -> None:
    for mask in MASKS.values():
        assert hides_the_future(mask)
    assert hides_the_future(torch.ones(N, 9, dtype=torch.bool).tril(3))
    assert hides_the_future(torch.block_diag(PAST, PAST).bool())
    assert hides_the_future(PAST & ~PAST.tril(-3))  # a window
    with torch.inference_mode():
        assert hides_the_future(PAST.clone())
    padding = torch.ones(2, 1, N, 9, dtype=torch.bool)
    padding[..., 3:] = False
    rows = padding.clone()
    rows[:, :, 2:] = False
    prefix = PAST.clone()
    prefix[:, :2] = True
    for other in (
        torch.eye(N).bool(),
        PAST[:1],
        torch.ones(N, N).bool(),
        torch.block_diag(*[torch.ones(2, 2)] * 3).bool(),
    ):
        assert not hides_the_future(other)
    for other in (padding, rows, prefix):
        assert not hides_the_future(other)


def test_a_mask_that_is_causal_and_nothing_else_is_recognized() -> None:
    future = torch.full((6, 6), -math.inf).triu(1)
    assert hides_the_future(future, only=True)
    assert hides_the_future(future[:4, :4], only=True)
    assert hides_the_future(future == 0, only=True)
    assert hides_the_future(future[:1, :1], only=True)
    assert not hides_the_future(future[:4, :5], only=True)
    assert not hides_the_future(future[1:, 1:] + 1, only=True)
    assert hides_the_future(future[1:, 1:], only=True)  # again a triangle
    assert not hides_the_future(future.masked_fill(torch.eye(6).bool().roll(-1, 0), -math.inf), only=True)
    future[5, 0] = -1.0
    assert not hides_the_future(future, only=True)  # the mask was changed since it was last looked at


def test_a_mask_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    mask = torch.zeros(4, 4)
    seen = []
    monkeypatch.setattr("quest_core.ops.hide_lowest", lambda x: seen.append(x) or x)
    for _ in range(3):
        attention(q, k, v, "quest+sinkhorn", attn_mask=mask)
    assert len(seen) == 1


def test_reading_a_learned_mask_leaves_nothing_in_the_graph() -> None:
    """Or a checkpoint, which repeats the call and reads nothing, would count other tensors."""
    q, k, v = torch.randn(3, 2, 4, N, 8)
    mask = torch.randn(N, N, requires_grad=True)
    out = checkpoint(lambda mask: attention(q, k, v, "quest+sinkhorn", attn_mask=mask), mask, use_reentrant=False)
    out.sum().backward()
    assert mask.grad is not None


def test_what_cannot_be_read_runs() -> None:
    """Under a compiler or a transform no number is known."""
    q, k, v = torch.randn(3, 2, 4, N, 8)
    torch.vmap(lambda mask: attention(q, k, v, "quest+sinkhorn", attn_mask=mask))(PAST.expand(2, N, N))
    compiled = torch.compile(attention, backend="eager")
    compiled(q, k, v, "quest+sinkhorn", attn_mask=PAST)
    torch._dynamo.reset()


def test_decoding_honours_masks_of_pairs() -> None:
    """A window hides tokens that the cache holds."""
    window = PAST & ~PAST.tril(-3)
    model, x = stack("elliptical"), torch.randn(2, N, 32)
    whole = model(x, attn_mask=window)
    caches = [quest_core.Cache() for _ in range(2)]
    outs, start = [], 0
    with torch.no_grad():
        for stop in (3, 4, 6):
            y = x[:, start:stop]
            for layer, cache in zip(model.layers, caches, strict=True):  # type: ignore[arg-type]
                y = y + layer(y, is_causal=True, cache=cache, attn_mask=window[start:stop, :stop])
            outs.append(y)
            start = stop
    torch.testing.assert_close(torch.cat(outs, 1), whole)


@pytest.mark.parametrize("tokens", [(N, N), (4, N)])
def test_the_universal_route_refuses_a_mask_with_is_causal(tokens: tuple[int, int]) -> None:
    n, m = tokens
    model = universal("quest")

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            mask = None if x.shape[1] == 1 else torch.ones(n, m, dtype=torch.bool)
            return nn.functional.scaled_dot_product_attention(q[:, :, :n], q, q, mask, is_causal=mask is not None)

    model = quest_core.inject(Both(), "quest", example=torch.randn(1, 1, 32))[0]
    with pytest.raises(InputError, match="attn_mask and is_causal are both given"):
        model(torch.randn(2, m, 32))
