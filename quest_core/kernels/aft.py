"""The averages of the attention-free family in Triton: where they apply.

Reference: :func:`quest_core.mechanisms.reference_aft.weighted_average`. The eager path is
:mod:`quest_core.mechanisms.aft_ops`, which CPUs and float64 always take.

The kernels are proven against the reference under Triton's interpreter and compile for NVIDIA's sm_90. They have not
been measured on a GPU: that they win there, where the eager path launches a dozen kernels a tile and waits for a number
from the device, is an expectation. So only ``QUEST_KERNELS=fused`` takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mode import triton_takes

MAX_RANK = 256  # features r of a position, which a tile holds whole
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def aft_applies(k: Tensor, v: Tensor, rank: int = 0) -> bool:
    """Whether `aft_simple` and `aft_biased` are to be used in place of the eager path: where Triton kernels are asked
    for and can run, in half or single precision.

    Args:
        k: [B, H, M, D].
        v: [B, H, M, D].
        rank: features r of a position, 0 where the biases are a table or where there are none.
    """
    if not triton_takes(k):
        return False
    return k.dtype in DTYPES and v.dtype in DTYPES and rank <= MAX_RANK and min(k.numel(), v.numel()) > 0


def tokens_first(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H·D], a view of what a projection left."""
    return x.transpose(1, 2).flatten(2)


def aft_simple(k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The average of v weighted by exp(k), for inputs that `aft_applies` accepts.

    Args:
        k: [B, M, C], any strides; a key of −inf is invisible.
        v: [B, M, C].
        is_causal: one average for each token, of the tokens up to it.

    Returns:
        [B, M, C] if causal, else [B, 1, C], in float32; zero where nothing is visible.
    """
    from . import aft_triton

    average: Tensor = aft_triton.aft_simple(k, v, is_causal)[0]
    return average


def aft_biased(k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, is_causal: bool, window: int) -> Tensor:
    """The average of v weighted by exp(k_t' + w_tt'), for inputs that `aft_applies` accepts.

    Args:
        k: [B, M, C], any strides; a key of −inf is invisible.
        v: [B, M, C].
        left: [N, r] and right: [M, r], with w = left rightᵀ; or left: [N, M], w itself, and no right.
        is_causal: query i sees keys j ≤ i + M − N; M must not be smaller than N.
        window: w counts where the distance of the positions is smaller than this, and is 0 elsewhere; 0: everywhere.

    Returns:
        [B, N, C] in float32; zero where nothing is visible.
    """
    from . import aft_triton

    average: Tensor = aft_triton.aft_biased(k, v, left, right, is_causal, window)[0]
    return average
