"""Masks that hide the future are recognized, and what cannot be causal is refused under them."""

import math

import pytest
import torch
from models import Call
from torch import nn
from torch.utils.checkpoint import checkpoint

import quest_core
from quest_core import Attention, InputError, MultiheadAttention, UnsupportedError, attention
from quest_core.ops import hides_the_future

N = 6
PAST = torch.ones(N, N, dtype=torch.bool).tril()
MASKS = {
    "boolean": PAST,
    "additive": torch.zeros(N, N).masked_fill(~PAST, -math.inf),
    "finfo.min": torch.zeros(N, N).masked_fill(~PAST, torch.finfo(torch.float32).min),
    "a head": PAST.expand(2, 4, N, N),
}


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("attention", ["quest+sinkhorn", "quest+kdgqa(kv_heads=2)", "quest+pgqa(kv_heads=2)"])
def test_what_cannot_be_causal_refuses_masks_that_are(attention, added):
    """`check_mechanism` tests mechanisms; here a layer adds keys to the triangle."""
    x = torch.randn(N, 2, 32)
    with pytest.raises(UnsupportedError, match="cannot be causal"):
        MultiheadAttention(32, 4, attention=attention, **added)(x, x, x, attn_mask=~PAST)


def test_masks_that_hide_the_future_are_recognized():
    for mask in MASKS.values():
        assert hides_the_future(mask)
    with torch.inference_mode():
        assert hides_the_future(PAST.clone())
    prefix = PAST.clone()
    prefix[:, :2] = True
    assert not hides_the_future(prefix)


def test_drawn_masks_follow_the_definition():
    """Key j of M is in the future of query i of N if j > i + M − N; a mask of padding has visible rows and columns."""
    for _ in range(300):
        heads, n, m = (int(x) for x in torch.randint(1, 5, (3,)))
        seen = torch.rand(2, heads, n, m) < torch.rand(())
        future = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
        seen &= ~future | (torch.rand(()) < 0.2)
        is_padding = torch.equal(seen, seen.any(-1, keepdim=True) & seen.any(-2, keepdim=True))
        sees_more_than_now = bool((seen & torch.ones(n, m).tril(m - n - 1).bool()).any())
        wanted = not bool((seen & future).any()) and not is_padding and sees_more_than_now
        bias = torch.randn(seen.shape).masked_fill(~seen, -math.inf)
        assert [hides_the_future(mask) for mask in (seen, bias)] == [wanted, wanted], seen
        wanted, zeros = bool((seen == ~future).all()), torch.where(seen, 0.0, -math.inf)
        assert [hides_the_future(mask, only=True) for mask in (seen, zeros)] == [wanted, wanted], seen


def test_a_mask_that_was_changed_is_read_again():
    future = torch.full((6, 6), -math.inf).triu(1)
    assert hides_the_future(future, only=True)
    future[5, 0] = -1.0  # it adds something, too
    assert not hides_the_future(future, only=True)


def test_a_mask_is_read_once(monkeypatch):
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    mask = torch.zeros(4, 4)
    seen = []
    monkeypatch.setattr("quest_core.ops.hide_lowest", lambda x: seen.append(x) or x)
    for _ in range(3):
        attention(q, k, v, "quest+sinkhorn", attn_mask=mask)
    assert len(seen) == 1


def test_reading_a_learned_mask_leaves_nothing_in_the_graph():
    """Or a checkpoint, which repeats the call and reads nothing, would count other tensors."""
    q, k, v = torch.randn(3, 2, 4, N, 8)
    mask = torch.randn(N, N, requires_grad=True)
    out = checkpoint(lambda mask: attention(q, k, v, "quest+sinkhorn", attn_mask=mask), mask, use_reentrant=False)
    out.sum().backward()
    assert mask.grad is not None


def test_what_cannot_be_read_runs():
    """Under a compiler or a transform no number is known."""
    q, k, v = torch.randn(3, 2, 4, N, 8)
    torch.vmap(lambda mask: attention(q, k, v, "quest+sinkhorn", attn_mask=mask))(PAST.expand(2, N, N))
    compiled = torch.compile(attention, backend="eager")
    compiled(q, k, v, "quest+sinkhorn", attn_mask=PAST)
    torch._dynamo.reset()


def test_decoding_honors_masks_of_pairs():
    """A window hides tokens that the cache holds."""
    window = PAST & ~PAST.tril(-3)
    layers = nn.ModuleList(Attention(32, 4, "elliptical") for _ in range(2)).eval()
    quest_core.chain(layers)
    x = torch.randn(2, N, 32)
    whole = layers[1](layers[0](x, attn_mask=window), attn_mask=window)
    caches, outs = [quest_core.Cache() for _ in range(2)], []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        y = x[:, start:stop]
        for layer, cache in zip(layers, caches, strict=True):
            y = layer(y, is_causal=True, cache=cache, attn_mask=window[start:stop, :stop])
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), whole)


def test_the_universal_route_refuses_a_mask_with_is_causal():
    model = quest_core.inject(Call(), "quest", example=torch.randn(1, 4, 1, 8))[0]
    with pytest.raises(InputError, match="attn_mask and is_causal are both given"):
        model(torch.randn(2, 4, N, 8), mask=PAST, is_causal=True)
