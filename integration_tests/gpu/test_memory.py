"""Peak memory of training: linear in the length, and for QUEST that of standard attention and copies of the keys."""

import pytest
import torch

import quest_core

from .measure import peak_bytes

LINEAR = [
    "standard",
    "quest",
    "qknorm-hs",
    "quest+gqa(kv_heads=2)",
    "quest+dgqa(kv_heads=2)",
    "quest+sigmoid",
    "linear",
    "cosine",
    "aft-simple",
]
HEADS, DIM = 4, 64


def training_peak(attention, tokens, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = quest_core.Mechanism(attention, num_heads=HEADS, head_dim=DIM).to(device)
    groups = 2 if "gqa" in attention else HEADS
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, groups, groups)
    )

    def call():
        out = made(q, k, v)
        out.backward(out.detach())
        q.grad = k.grad = v.grad = None

    call()
    return peak_bytes(call, device)


@pytest.mark.parametrize(
    ("attention", "device"),
    [("quest", "cpu"), ("aft-simple", "cpu"), *(pytest.param(a, "cuda", marks=pytest.mark.gpu) for a in LINEAR)],
)
def test_memory_grows_with_the_length_and_not_its_square(attention, device):
    tokens = 16384 if device == "cuda" else 512
    assert training_peak(attention, 2 * tokens, device) < 2.2 * training_peak(attention, tokens, device)


def test_quest_needs_few_copies_of_the_keys_more_than_standard(device):
    """Forward: unit keys. Backward: their gradient and that of the keys, both in float32."""
    tokens = 16384 if device == "cuda" else 512
    copy = tokens * HEADS * DIM * (2 if device == "cuda" else 4)
    extra = training_peak("quest", tokens, device) - training_peak("standard", tokens, device)
    assert extra <= 5 * copy
