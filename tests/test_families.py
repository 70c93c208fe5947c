"""linear, cosine and the attention-free family: no tokens, no numbers, and large or square grids."""

import pytest
import test_aft
import test_linear
import torch

import quest_core
from quest_core import ops as blocks

SPECS = ["linear", "cosine", "aft-simple", "aft-full(max_length=96)", "aft-local(max_length=96)", "aft-conv(dims=1)"]
CASES = [(spec, causal) for spec in SPECS for causal in (False, True) if not (causal and "conv" in spec)]


def build(spec, heads=2, dim=4):
    return test_aft.build(spec, heads, dim) if spec.startswith("aft") else test_linear.build(spec, heads, dim)


def truth(made, q, k, v, mask, is_causal):
    if str(made.config).startswith("aft"):
        return test_aft.truth(made, q, k, v, mask=mask, is_causal=is_causal, grid=(q.shape[2],))
    key_mask = None if mask is None else mask[:, 0, 0]
    return test_linear.truth(made, q, k, v, key_mask=key_mask, is_causal=is_causal)


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 5), (5, 1)])
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
def test_no_tokens_on_one_side(spec, is_causal, n, m):
    made = build(spec)
    q, k, v = (x.requires_grad_() for x in test_aft.tensors(spec, 2, 2, n, m, 4))
    if "conv" in spec or ("local" in spec and n != m and not is_causal):
        with pytest.raises(quest_core.QuestError, match="'aft-(conv|local)'"):
            made(q, k, v, is_causal=is_causal)
        return
    for mask in (None, torch.ones(2, 1, 1, m, dtype=torch.bool), torch.zeros(2, 1, 1, m, dtype=torch.float64)):
        out = made(q, k, v, attn_mask=mask, is_causal=is_causal)
        if m:
            torch.testing.assert_close(out, truth(made, q, k, v, mask, is_causal))
        assert out.shape == (2, 2, n, 4)
        assert m or not out.any()
        out.sum().backward()


def test_a_large_grid_has_a_second_derivative(monkeypatch):
    for name, value in (("PLAIN_WEIGHTS", 0), ("BLOCK_WEIGHTS", 1), ("BLOCK_ROWS", 3)):
        monkeypatch.setattr(blocks, name, value)
    made = build("aft-conv(dims=1)")
    inputs = [x.requires_grad_() for x in test_aft.tensors("aft-conv", 1, 2, 5, 5, 4)]
    assert torch.autograd.gradgradcheck(made, inputs)


def test_a_dynamic_square_is_refused():
    made, n = build("aft-conv(window=3)"), torch.export.Dim("n", min=2, max=96)
    inputs = dict(zip(("q", "k", "v"), test_aft.tensors("aft-conv", 2, 2, 36, 36, 4), strict=True))
    with pytest.raises(quest_core.UnsupportedError, match="'aft-conv' does not support torch.export with a dynamic"):
        torch.export.export(made, (), inputs, dynamic_shapes={name: {2: n} for name in inputs})
