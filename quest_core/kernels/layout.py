"""How tensors lie in memory, so that kernels can read them as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def memory_order(stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The permutation that makes a dense tensor of these strides contiguous (last axis kept last), and its inverse."""
    order = (*sorted(range(len(stride) - 1), key=stride.__getitem__, reverse=True), len(stride) - 1)
    return order, tuple(sorted(range(len(order)), key=order.__getitem__))


def empty_rows(x: Tensor, features: int | None = None) -> Tensor:
    """An empty tensor of the shape of `x` (or with other `features`), its axes in the same order in memory, no gaps."""
    order, back = memory_order(x.stride())
    sizes = [x.shape[axis] for axis in order]
    if features is not None:
        sizes[-1] = features
    return x.new_empty(sizes).permute(back)


def merge_axes(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The fewest axes that walk through the same elements in the same order.

    Args:
        sizes: of the axes, outermost first.
        strides: for each tensor, its strides along these axes.

    Returns:
        Sizes, and the strides of each tensor, with every pair of neighbours merged that is one axis in all tensors.
    """
    merged: list[int] = []
    out: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if merged and all(kept[-1] == stride[axis] * size for kept, stride in zip(out, strides, strict=True)):
            merged[-1] *= size
            for kept, stride in zip(out, strides, strict=True):
                kept[-1] = stride[axis]
        else:
            merged.append(size)
            for kept, stride in zip(out, strides, strict=True):
                kept.append(stride[axis])
    return merged, out
