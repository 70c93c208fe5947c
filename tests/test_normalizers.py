"""Sigmoid and sinkhorn against their float64 references, plain and in blocks, and every score with every normalizer."""

import math
from contextlib import nullcontext

import pytest
import torch
from allocations import Largest
from grid.draws import small_blocks

import quest_core
from quest_core import ops as blocks
from quest_core.testing.truth import exact

PATHS = {"plain": nullcontext, "blocks": lambda: small_blocks(3)}  # the plain formula, or blocks of three queries


def tensors(batch, heads, groups, n, m, dim, seed=0):
    """q [B, H, N, D], k and v [B, G, M, D] in float64, laid out as projections leave them."""
    made = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, tokens, h, dim, generator=made, dtype=torch.float64).transpose(1, 2)
        for h, tokens in ((heads, n), (groups, m), (groups, m))
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "spec", ["sigmoid", "quest+sigmoid(bias=-0.5)+gqa(kv_heads=2)", "sinkhorn", "quest+sinkhorn(iterations=2, eps=0.7)"]
)
def test_blocks_equal_the_reference(spec, is_causal):
    """tests/grid draws other sizes and masks."""
    made = quest_core.Mechanism(spec, num_heads=4, head_dim=4)
    if is_causal and "sinkhorn" in spec:
        return
    bias = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*tensors(2, 4, 2 if "gqa" in spec else 4, 7, 8, 4), bias)]
    mask = bias.masked_fill(torch.rand(2, 1, 7, 8) > 0.6, -math.inf)
    want = exact(made, *inputs[:3], attn_mask=mask, is_causal=is_causal)[0]
    with small_blocks(3):
        got = made(*inputs[:3], attn_mask=mask, is_causal=is_causal)
        gradients = torch.autograd.grad(got.sin().sum(), inputs, retain_graph=True)  # of the mask
    wanted = torch.autograd.grad(want.sin().sum(), inputs)
    torch.testing.assert_close((got, *gradients), (want, *wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", PATHS)
def test_logits_of_a_thousand_stay_exact(way):
    """A key that no query wants still has to fill its column: e^-1000 is scaled up without passing through 0."""
    q, k, v = tensors(1, 1, 1, 6, 6, 4)
    q = q * 1000
    with PATHS[way]():
        out = quest_core.attention(q, k, v, "quest+sinkhorn(iterations=40)")
    assert out.isfinite().all()
    weights = quest_core.Mechanism("quest+sinkhorn(iterations=40)", num_heads=1, head_dim=4).forward_with_weights(
        q, k, v
    )[1]
    torch.testing.assert_close(weights.sum(-2), torch.ones(1, 1, 6, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, out)


def weights_of(spec, q, k, mask=None):
    made = quest_core.Mechanism(spec, num_heads=q.shape[1], head_dim=q.shape[-1])
    return made.forward_with_weights(q, k, torch.zeros_like(k), attn_mask=mask)[1]


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7), (8, 3), (1, 4), (4, 1)])
def test_half_steps_leave_the_sums_they_promise(n, m):
    q, k, _ = tensors(2, 2, 2, n, m, 4)
    rows = torch.ones(2, 2, n, dtype=torch.float64)
    columns = torch.full((2, 2, m), n / m, dtype=torch.float64)
    torch.testing.assert_close(weights_of("quest+sinkhorn", q, k).sum(-1), rows)
    half = quest_core.Mechanism("quest+sinkhorn(iterations=2)", num_heads=2, head_dim=4)
    reference = half.normalizer.reference(half.logits(q, k), torch.ones(2, 2, n, m, dtype=torch.bool))
    for weights in (weights_of("quest+sinkhorn(iterations=2)", q, k), reference):
        torch.testing.assert_close(weights.sum(-2), columns)
    many = weights_of("quest+sinkhorn(iterations=300)", q, k)
    torch.testing.assert_close(many.sum(-1), rows, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(many.sum(-2), columns, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("spec", ["quest+sigmoid", "quest+sinkhorn", "quest+sinkhorn(iterations=2)"])
def test_dropout_acts_on_the_weights_and_repeats_under_a_seed(spec, way):
    q, k, v = tensors(2, 2, 2, 6, 6, 4)

    def run(*inputs):
        torch.manual_seed(0)
        return quest_core.attention(*inputs, spec, dropout_p=0.5)

    with PATHS[way]():
        first = run(q, k, v)
        assert torch.equal(first, run(q, k, v))
        # With unit values the output is the weights themselves: each is 0 or twice what it was.
        eye = torch.eye(6, dtype=torch.float64).expand(2, 2, 6, 6)
        ratio = run(q, k, eye) / quest_core.attention(q, k, eye, spec)
        assert set(ratio.round(decimals=9).unique().tolist()) == {0.0, 2.0}
        assert torch.autograd.gradcheck(run, tuple(x[:1].requires_grad_() for x in (q, k, v)), fast_mode=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", ["quest+sigmoid", "quest+sinkhorn", "quest+sinkhorn(iterations=4)"])
def test_long_sequences_form_no_matrix_of_weights(spec, masked, monkeypatch):
    monkeypatch.setattr(blocks, "PLAIN_WEIGHTS", 2**16)
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 2**14)
    largest = []
    for tokens in (512, 1024):
        inputs = [x.float().requires_grad_() for x in tensors(1, 2, 2, tokens, tokens, 8)]
        mask = torch.rand(1, 1, 1, tokens) > 0.2 if masked else None
        with Largest() as seen:
            quest_core.attention(*inputs, spec, attn_mask=mask).sum().backward()
        largest.append(seen.elements)
    assert largest[1] == 2 * blocks.BLOCK_ROWS * 1024  # a block of one width, and nothing larger
    assert largest[1] == 2 * largest[0]


@pytest.mark.parametrize("kind", ["additive", "boolean", "padding"])
@pytest.mark.parametrize("spec", ["standard", "quest", "quest+sigmoid", "quest+sinkhorn"])
def test_logits_of_an_earlier_layer_leave_the_gradients_of_blind_rows_finite(spec, kind):
    """RealFormer's residual: the logits of a row that sees no key are -inf in the next layer too."""
    mechanism, tensors = quest_core.Mechanism(spec), [torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(2, 1, 4, 4)
    mask[0, :, 0] = -math.inf
    if kind == "padding":  # of the first two keys, so that the first two causal rows see nothing
        mask = torch.zeros(2, 1, 1, 4)
        mask[0, ..., :2] = -math.inf
    mask = mask == 0 if kind == "boolean" else mask
    logits = None
    for _ in range(2):
        causal = kind == "padding" and spec != "quest+sinkhorn"
        out, _, logits = mechanism.forward_with_logits(*tensors, attn_mask=mask, is_causal=causal, residual=logits)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in tensors)
