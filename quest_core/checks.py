"""What fits together: the tensors of one call of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .compat import autocast_dtype
from .errors import InputError

TYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
NAMES = "float32, bfloat16, float16 or float64"


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, key_dim: int | None, cached: int
) -> tuple[int, int]:
    """Return the heads of q and of k; raise InputError unless q, k, v and mask fit together.

    Args:
        key_dim: the features that k must have; None for those of q.
        cached: further keys, before those of k, that the mask covers.
    """
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.dtype in TYPES
    for name, x in () if alike and q.dim() == k.dim() == v.dim() == 4 else (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InputError(f"{name} has shape {list(x.shape)}; it needs four axes: batch, heads, tokens, features")
        if x.dtype not in TYPES:
            raise InputError(f"{name} is {x.dtype}; attention takes {NAMES}")
        if x.dtype != q.dtype and autocast_dtype(q.device.type) is None:
            raise InputError(f"q is {q.dtype} but {name} is {x.dtype}; convert them to one type")
        if x.device != q.device:
            raise InputError(f"q is on {q.device} but {name} is on {x.device}")
    if q.is_nested:
        raise InputError(
            "q is a nested tensor; pad it and say with a mask what is real, or use quest_core.attention_packed"
        )
    batch, heads, n, dim = q.shape
    batch_k, heads_k, m, dim_k = k.shape
    batch_v, heads_v, m_v, _ = v.shape
    if batch_k != batch or batch_v != batch:
        raise InputError(f"batch sizes differ: q {batch}, k {batch_k}, v {batch_v}")
    if dim_k != (key_dim or dim):
        raise InputError(f"k has {dim_k} features a head where q's {dim} ask for {key_dim or dim}")
    if heads_v != heads_k or m_v != m:
        raise InputError(f"k has (heads, tokens) {(heads_k, m)} but v has {(heads_v, m_v)}")
    if not 0 <= dropout_p < 1:
        raise InputError(f"dropout_p is {dropout_p}; it is a probability in [0, 1)")
    m += cached
    if mask is not None:
        full = (batch, heads, n, m)
        if mask.dtype not in (torch.bool, *TYPES):
            raise InputError(f"attn_mask is {mask.dtype}; it is boolean (True = may attend) or additive, of {NAMES}")
        if mask.dim() not in (2, 4) or any(mask.shape[i] not in (1, full[i]) for i in range(-mask.dim(), 0)):
            raise InputError(
                f"attn_mask has shape {list(mask.shape)}; it needs [N, M] = [{n}, {m}] or something that broadcasts to "
                f"[B, H, N, M] = [{batch}, {heads}, {n}, {m}] (a mask per sample [B, N, M] is written mask[:, None])"
            )
    return heads, heads_k
