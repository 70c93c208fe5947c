"""Serialized attention where the host would call flash-attn: patches of several lengths, in half on a GPU."""

import copy

import pytest
import torch

pytest.importorskip("torch_pointcloud", reason="torch-pointcloud is not installed in this Python")

from torch_pointcloud.layers.serialized_attention import SerializedAttention, SerializedAttentionRoPE

import quest_core
import quest_core.tools.packing
from quest_pointcept import PointceptAdapter

environment = "quest-pointcept"

COUNTS, PATCH, CHANNELS = (700, 90, 333), 128, 96
TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}  # bfloat16 and float16 in one product each way


def make(kind, attention):
    torch.manual_seed(0)
    host = kind(CHANNELS, 4, PATCH, use_flash_attn=False, upcast_attn=False, upcast_softmax=False)
    host.use_flash_attn = True  # flash-attn is not needed: the attention is replaced
    return quest_core.inject(host, attention, adapter=PointceptAdapter())[0]


def run(module, x, batch, order, coord):
    x = x.clone().requires_grad_()
    out = module(x, None, batch, order, order.argsort(), pos=coord)
    out.square().sum().backward()  # a mean has gradients below the least float16
    return out.detach(), x.grad


@pytest.mark.parametrize("kind", [SerializedAttention, SerializedAttentionRoPE])
@pytest.mark.parametrize("attention", ["standard", "quest", "quest+gqa(kv_heads=2)", "qknorm-hs"])
def test_packed_patches(kind, attention, device, monkeypatch):
    """Outputs and gradients against float64, and on a GPU only through the variable-length kernel."""
    module = make(kind, attention)
    exact = copy.deepcopy(module).double()
    x, coord = torch.randn(sum(COUNTS), CHANNELS), torch.rand(sum(COUNTS), 3)
    batch = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    order = (batch * 2 + torch.rand(len(batch))).argsort()  # clouds stay behind each other
    want = run(exact, x.double(), batch, order, coord.double())

    calls = []
    varlen = quest_core.tools.packing._varlen
    monkeypatch.setattr(
        quest_core.tools.packing, "_varlen", lambda *given: (calls.append(given[0].dtype), varlen(*given))[1]
    )
    got = run(module.to(device), *(part.to(device) for part in (x, batch, order, coord)))
    kernel = quest_core.tools.packing._varlen_attn("gqa" in attention)
    assert len(calls) == (1 if device == "cuda" and kernel else 0)
    for ours, theirs in zip(got, want, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=TOLERANCE[device] * scale)
