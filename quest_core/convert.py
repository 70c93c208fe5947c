"""Checkpoints between mechanisms whose projections differ in shape."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


def pool_heads(projection: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """Key or value projection of H heads -> of G heads: each group's is the mean of its heads.

    Ainslie et al. (2023), section 2.1, show that the mean keeps most of what a multi-head checkpoint has learned.

    Args:
        projection: weight [H·D, E] or bias [H·D].
        num_heads: H, a multiple of `kv_heads`.
        kv_heads: G.

    Returns:
        [G·D, E] or [G·D].
    """
    rows = projection.shape[0]
    if rows % num_heads or num_heads % kv_heads:
        raise InputError(
            f"the {num_heads} heads of a projection with {rows} rows cannot be pooled into {kv_heads}: a checkpoint "
            "converts only where kv_heads divides the heads"
        )
    tail = projection.shape[1:]
    heads = projection.reshape(kv_heads, num_heads // kv_heads, rows // num_heads, *tail)  # [G, H/G, D, E]
    return heads.mean(1).reshape(rows // num_heads * kv_heads, *tail)


def pool_in_projection(projection: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """Packed q, k, v projection of H heads -> with G key and value heads: [3·H·D, E] -> [(H + 2·G)·D, E]."""
    q, k, v = projection.chunk(3)
    return torch.cat([q, pool_heads(k, num_heads, kv_heads), pool_heads(v, num_heads, kv_heads)])
