"""Sequences of unlike length without padding: on a GPU by PyTorch's variable-length flash kernels, and nothing else."""

import copy

import pytest
import torch

import quest_core
import quest_core.tools.packing
from quest_core.mechanism import count_kv_heads

LENGTHS = {"cpu": [7, 1, 12], "cuda": [700, 1, 333, 64]}


def one_at_a_time(q, k, v, module, lengths, is_causal):
    """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([module(*part, is_causal=is_causal)[0].transpose(0, 1) for part in parts])


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
def test_packed_sequences(attention, dtype, is_causal, device, monkeypatch):
    """Outputs and gradients against float64: at most twice the error of one sequence at a time."""
    lengths, heads, dim = LENGTHS[device], 4, 64 if device == "cuda" else 8
    made = quest_core.Mechanism(attention, num_heads=heads, head_dim=dim).to(device)
    groups = count_kv_heads(attention, heads)
    inputs = [torch.randn(sum(lengths), h, dim, dtype=torch.float64).to(device, dtype) for h in (heads, groups, groups)]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    grad = torch.randn(sum(lengths), heads, dim, dtype=torch.float64).to(device)
    calls = []
    varlen = quest_core.tools.packing._varlen
    monkeypatch.setattr(
        quest_core.tools.packing, "_varlen", lambda *given: (calls.append(given[0].dtype), varlen(*given))[1]
    )
    found = []
    for apart, wide in ((False, False), (True, False), (True, True)):
        module = copy.deepcopy(made).double() if wide else copy.deepcopy(made).to(dtype)
        leaves = [(x.double() if wide else x.clone()).requires_grad_() for x in inputs]
        if apart:
            out = one_at_a_time(*leaves, module, lengths, is_causal)
        else:
            out = quest_core.attention_packed(*leaves, module, cu_seqlens=ends, is_causal=is_causal)
        found.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    kernel = quest_core.tools.packing._varlen_attn("gqa" in attention)
    assert calls == ([dtype] if device == "cuda" and kernel else [])
    for got, plain, truth in zip(*found, strict=True):
        error, yardstick = (got.double() - truth).norm(), (plain.double() - truth).norm()
        assert got.dtype == dtype
        assert error <= max(2 * yardstick, 4 * torch.finfo(dtype).eps * truth.norm())
