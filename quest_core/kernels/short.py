"""QUEST attention over short sequences in one kernel, the key normalisation inside: where it applies.

At a few hundred tokens writing k̄ to memory and reading it back costs about as much as attending. Reference:
:func:`quest_core.mechanisms.reference.attention` with score "quest".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mode import triton_takes

MAX_TOKENS = 512
MAX_DIM = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def short_applies(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, dropout_p: float) -> bool:
    """Whether `short_attention` is to be used in place of unit keys and scaled_dot_product_attention.

    It can be for at most 512 queries and keys and 128 features, float16, bfloat16 or float32, without dropout and with
    no mask but a boolean one of keys. Whether it then wins has not been measured, so only ``QUEST_KERNELS=fused`` takes
    it; a measurement on a GPU is to turn this condition into a rule on N, M and D.

    Args:
        q: [B, H, N, D].
        k: [B, G, M, D] and v: [B, G, M, Dv].
        mask: as for attention; boolean of shape [B or 1, 1, 1, M] is what the kernel reads.
        dropout_p: dropout on the weights.
    """
    if dropout_p > 0 or not triton_takes(q):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1)):
        return False
    sizes = (*q.shape, *k.shape, *v.shape)
    return (
        min(sizes) > 0
        and max(q.shape[2], k.shape[2]) <= MAX_TOKENS
        and max(q.shape[3], v.shape[3]) <= MAX_DIM
        and not torch._C._are_functorch_transforms_active()
    )


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """softmax(scale · q k̄ᵀ) v, [B, H, N, Dv], for inputs that `short_applies` accepts.

    Args:
        q: queries [B, H, N, D], any strides.
        k: keys as they come, [B, G, M, D], H a multiple of G.
        v: values [B, G, M, Dv].
        scale: the factor on the logits.
        mask: None or boolean [B or 1, 1, 1, M], True where a key may be attended to.
        is_causal: query i sees keys j ≤ i + M − N.

    Returns:
        Zeros for a query with no visible key. The axes lie in memory in the order of those of `q`.
    """
    from . import short_triton

    keys = None if mask is None else mask[:, 0, 0].expand(q.shape[0], k.shape[2])  # [B, M]
    out: Tensor = short_triton.short_attention(q, k, v, keys, is_causal, scale)[0]
    return out
