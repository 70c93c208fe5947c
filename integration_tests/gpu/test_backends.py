"""Softmax mechanisms reach the fused kernels: the profiler sees it, and on a GPU no back-end but flash is allowed."""

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import quest_core

from .measure import back_ends

ATTENTIONS = [
    "standard",
    "quest",
    "qnorm",
    "qknorm-hs",
    "qknorm-ds",
    "qknorm",
    "quest+gqa(kv_heads=2)",
    "quest+mqa",
    "quest+kdgqa(kv_heads=2)",
    "quest+dgqa(kv_heads=2)",
    "elliptical-quest",
]


def layer(attention, device, dim):
    made = quest_core.Attention(4 * dim, 4, attention, device=device)
    quest_core.chain(made)
    return made


def step(made, x, dtype, is_causal):
    with torch.autocast(x.device.type, dtype):
        out = made(x, is_causal=is_causal)
    out.float().square().mean().backward()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_training_reaches_the_flash_kernel(attention, dtype, dim, device):
    dim, tokens = (dim, 256) if device == "cuda" else (dim // 8, 70)
    made, x = layer(attention, device, dim), torch.randn(2, tokens, 4 * dim, device=device)
    for is_causal in (False, True) if "kdgqa" not in attention else (False,):
        # On a GPU anything else would now raise. A context serves once.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext():
            assert back_ends(lambda causal=is_causal: step(made, x, dtype, causal)) == {"flash"}


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+gqa(kv_heads=2)"])
def test_the_default_choice_is_a_fused_kernel(attention, device):
    """Without a hint PyTorch takes flash or cuDNN; with a padding mask cuDNN or the memory-efficient kernel."""
    dim, tokens = (64, 256) if device == "cuda" else (16, 70)
    made = layer(attention, device, dim)
    x = torch.randn(2, tokens, 4 * dim, device=device)
    assert back_ends(lambda: step(made, x, torch.bfloat16, False)) <= {"flash", "cudnn"}
    mask = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens // 2]], device=device)

    def masked():
        with torch.autocast(device, torch.bfloat16):
            made(x, key_mask=mask).float().sum().backward()

    assert back_ends(masked) <= {"flash", "cudnn", "efficient"}
    assert back_ends(masked)


def test_the_profiler_tells_back_ends_apart(device):
    q = torch.randn(1, 2, 64, 16, device=device)
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        assert back_ends(lambda: attend(q, q, q)) == {"math"}
    assert back_ends(lambda: q + 1) == set()
