"""Linear and cosine attention against float64 references that form every weight."""

import math

import pytest
import torch
from allocations import Largest
from test_aft import build, truth
from test_normalizers import tensors

import quest_core
from quest_core.mechanisms import linear

NAMES = ["linear", "cosine"]


def test_an_additive_mask_multiplies_the_weights():
    q, k, v = tensors(2, 2, 2, 70, 70, 4)
    bias = (3 * torch.randn(2, 70, dtype=torch.float64)).masked_fill(torch.rand(2, 70) < 0.3, -math.inf)
    for name, is_causal in ((name, c) for name in NAMES for c in (False, True)):
        made = build(name, 2, 4)
        want = truth(made, q, k, v, mask=bias[:, None, None], is_causal=is_causal)
        torch.testing.assert_close(made(q, k, v, attn_mask=bias[:, None, None], is_causal=is_causal), want)
        cache = quest_core.Cache()
        steps = [
            made.decode(*(x[:, :, a:b] for x in (q, k, v)), cache, attn_mask=bias[:, None, None, :b])
            for a, b in ((0, 65), (65, 66), (66, 70))
        ]
        torch.testing.assert_close(torch.cat(steps, 2), truth(made, q, k, v, mask=bias[:, None, None], is_causal=True))
    far = bias.float() - 300  # exp of it is 0 in float32, and the ratio is the same
    out = build("linear", 2, 4).float()(q.float(), k.float(), v.float(), attn_mask=far[:, None, None])
    torch.testing.assert_close(
        out.double(), truth(build("linear", 2, 4), q, k, v, mask=bias[:, None, None]), rtol=1e-4, atol=1e-4
    )


def test_features_far_below_zero_do_not_cancel():
    """elu(-30) + 1 is 0 in float32, exp(-30) is not: a query of such features still has its weights."""
    q, k, v = (
        (x - shift).float().requires_grad_() for x, shift in zip(tensors(1, 1, 1, 3, 4, 2), (30, 30, 0), strict=True)
    )
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, want = quest_core.attention(q, k, v, "linear"), truth(quest_core.Mechanism("linear"), *wide)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    found, right = torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(want.square().sum(), wide)
    torch.testing.assert_close([x.double() for x in found], list(right), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [-50.0, -90.0, -100.0])
def test_padding_hidden_by_a_moderate_bias_poisons_no_gradient(bias):
    """The first rows see only keys of weight exp(bias), whose reciprocal or its derivative float32 cannot hold."""
    inputs = [x.float().requires_grad_() for x in tensors(1, 1, 1, 6, 6, 2)]
    mask = torch.zeros(1, 1, 1, 6).index_fill(3, torch.tensor([0, 1]), bias)
    out = quest_core.attention(*inputs, "linear", attn_mask=mask, is_causal=True)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out[:, :, 2:].sum(), inputs))


def test_sums_in_float16_do_not_overflow():
    q, k, v = (x.half() for x in tensors(1, 1, 1, 500, 500, 8))
    out = quest_core.attention(q + 20, k + 20, v, "linear", is_causal=True)
    want = truth(quest_core.Mechanism("linear"), q + 20, k + 20, v, is_causal=True)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)


def test_the_starting_value_is_that_of_the_specification():
    made = quest_core.Mechanism("cosine", num_heads=3, head_dim=4)
    assert made.family.stabiliser.flatten().tolist() == [0.5, 0.5, 0.5]
    q = k = torch.tensor([2.0, 0, 0, 0]).expand(1, 3, 9, 4)
    out = made(q, k, torch.ones(1, 3, 9, 4))  # every cosine is 1: the output is n / n^σ(½)
    torch.testing.assert_close(out, torch.full_like(out, 9 ** (1 - 1 / (1 + math.exp(-0.5)))))


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_the_lower_type_and_sums_in_float32(name):
    q, k, v = (x.float() for x in tensors(2, 2, 2, 100, 100, 16))
    made = build(name, 2, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = made(q, k, v, is_causal=True)
        mixed = made(q.bfloat16(), k, v.bfloat16())
        cache = quest_core.Cache()
        decoded = made.decode(q, k, v, cache)
    assert out.dtype == mixed.dtype == decoded.dtype == torch.bfloat16
    assert cache["sum"].dtype == torch.float32
    # Nothing but the result is rounded.
    assert torch.equal(out, made(q, k, v, is_causal=True).bfloat16())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_memory_is_linear_in_the_tokens(name, is_causal):
    """No tensor is larger than a few times the inputs, and all that is ever made together doubles with the tokens."""
    dim = 16
    made = build(name, 2, dim).float()
    recorded = []
    for tokens in (2048, 4096):
        inputs = [x.float().requires_grad_() for x in tensors(1, 2, 2, tokens, tokens, dim)]
        with Largest() as seen:
            made(*inputs, is_causal=is_causal).sum().backward()
        assert seen.elements <= 2 * tokens * max(linear.CHUNK, dim + 1)  # C×C products of a chunk, or an input
        recorded.append(seen.made)
    assert recorded[1] <= 2.05 * recorded[0]
