"""Attention weights in blocks of queries, where all of them would not fit in memory.

A block is the plain formula on some queries. The backward pass computes it again, so that no [B, H, N, M] tensor exists
at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .pytorch import is_eager, wider

PLAIN_WEIGHTS = 2**23  # with this many weights a call or more, B·H·N·M, they are computed in blocks: 32 MiB of float32
BLOCK_WEIGHTS = 2**20  # weights a block, unless that would be fewer than `BLOCK_ROWS` queries
BLOCK_ROWS = 64  # least number of queries a block, below which matrix products are thin


def block_rows(n: int, weights: int) -> int | None:
    """Return how many of `n` queries make a block, each with `weights` weights, B·H·M; None if all do.

    Graphs and function transforms take the plain formula, because the loop would be one of a fixed length there.
    """
    if not is_eager() or n * weights < PLAIN_WEIGHTS:
        return None
    return max(BLOCK_ROWS, BLOCK_WEIGHTS // weights)


def recomputed(formula: Callable[..., Tensor], *tensors: Tensor | None, random: bool = False) -> Tensor:
    """Return formula(*tensors), of which the backward pass finds nothing kept; `random` repeats its random numbers."""
    out: Tensor = checkpoint(formula, *tensors, use_reentrant=False, preserve_rng_state=random)
    return out


def in_blocks(
    formula: Callable[..., Tensor],
    step: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    random: bool = False,
) -> Tensor:
    """Return formula(q, k, v, mask) of every block of queries, joined along axis 2.

    Args:
        formula: returns the output of a block; if it draws random numbers, pass `random`.
        step: queries of a block, as `block_rows` returns them.
        q: [B, H, N, D], k: [B, G, M, D] and v: [B, G, M, Dv].
        mask: boolean or additive, broadcastable to [B, H, N, M].
        is_causal: blocks get only the keys that their last query sees, so that each is a causal problem of its own.
    """
    n, m = q.shape[2], k.shape[2]
    dtypes, found, stop = (k.dtype, v.dtype), [], 0

    def narrow(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return formula(q, k.to(dtypes[0]), v.to(dtypes[1]), mask)

    k, v = k.to(wider(k.dtype)), v.to(wider(v.dtype))  # their gradients are sums over blocks
    queries = q.split(step, 2)
    masks = [mask] * len(queries) if mask is None or mask.shape[-2] == 1 else mask.split(step, -2)
    for rows, part in zip(queries, masks, strict=True):
        stop += rows.shape[2]
        seen = slice(max(stop + m - n, 0) if is_causal else m)
        part = part if part is None or part.shape[-1] == 1 else part[..., seen]
        found.append(recomputed(narrow, rows, k[:, :, seen], v[:, :, seen], part, random=random))
    return torch.cat(found, 2)
