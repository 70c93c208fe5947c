"""Checkpoints between mechanisms whose projections differ in shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from .errors import InputError

Pool: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""(projection of H heads, H, G) -> projection of G heads: `pool_heads` or `keep_heads`."""


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
    _check_heads(projection, num_heads, kv_heads)
    pooled: Tensor = projection.unflatten(0, (kv_heads, num_heads // kv_heads, -1)).mean(1).flatten(0, 1)
    return pooled


def keep_heads(projection: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """As `pool_heads`, but each group keeps its first head.

    For weights that have only been initialised: the mean of H/G random heads would shrink their spread by √(H/G).
    """
    _check_heads(projection, num_heads, kv_heads)
    kept: Tensor = projection.unflatten(0, (kv_heads, num_heads // kv_heads, -1))[:, 0].flatten(0, 1)
    return kept


def is_pooled(attention: object, num_heads: int, kept: int, wanted: int) -> bool:
    """Whether a replaced module has fewer key/value heads than its host had, so that nothing is left to pool.

    Args:
        attention: what the module computes, for the message.
        num_heads: query heads.
        kept: the key/value heads that it has.
        wanted: those that it shall have.

    Raises:
        InputError: it has been pooled to another number, and the rest of its weights is gone.
    """
    if kept not in (num_heads, wanted):
        raise InputError(
            f"this module has {kept} key/value heads already (attention '{attention}'); build the model anew to choose "
            "another attention"
        )
    return kept != num_heads


def _check_heads(projection: Tensor, num_heads: int, kv_heads: int) -> None:
    rows = projection.shape[0]
    if rows % num_heads or num_heads % kv_heads:
        raise InputError(
            f"the {num_heads} heads of a projection with {rows} rows cannot be pooled into {kv_heads}: a checkpoint "
            "converts only where kv_heads divides the heads"
        )
