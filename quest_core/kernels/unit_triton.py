"""Unit vectors in one pass forward and one backward, in Triton. Import it only where `mode.triton_takes` holds.

Reference: :func:`quest_core.mechanisms.reference.unit`. Rows are read with the strides they have, so a transposed
tensor or a slice of packed q, k and v is not copied first; results are written without gaps, axes in the order in
which they lie in memory. Sums are in float32, for float64 in float64. The backward pass finds the norm again, which
costs nothing beside reading x, so x is all that is kept.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
# Inside a Triton kernel nothing has a Python type.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import empty_rows, memory_order, merge_axes

MAX_DIM = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TILE = 2048  # elements a program handles: 16 for each of 128 threads


def applies(x: Tensor) -> bool:
    """Whether `unit` takes x [..., D]: D ≤ 1024, a dtype of `DTYPES`, and a number of rows that int32 holds."""
    return 0 < x.shape[-1] <= MAX_DIM and x.dtype in DTYPES and 0 < x.numel() // x.shape[-1] < 2**31 - TILE


@triton.jit
def _inverse_norm(x):
    """[R, D] -> 1 / ‖x‖ or 0, [R, 1], in the type of x: float32 or float64."""
    square = tl.sum(x * x, axis=1)[:, None]
    norm = tl.sqrt(square) if x.dtype == tl.float64 else tl.sqrt_rn(square)
    return tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)


@triton.jit
def _row_offset(row, size1, size2, stride0, stride1, stride2):
    """Where row number `row` of a tensor with three leading axes begins, int64."""
    outer = row // size2
    return (
        (outer // size1).to(tl.int64) * stride0
        + (outer % size1).to(tl.int64) * stride1
        + (row % size2).to(tl.int64) * stride2
    )[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    out_ptr,
    rows,
    dim,
    size1,
    size2,
    x0,
    x1,
    x2,
    x_dim,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)[None, :].to(tl.int64)  # features may lie far apart
    inside = (row < rows)[:, None] & (column < dim)
    x = tl.load(x_ptr + _row_offset(row, size1, size2, x0, x1, x2) + column * x_dim, mask=inside, other=0).to(WIDE)
    out = x * _inverse_norm(x)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * dim + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    rows,
    dim,
    size1,
    size2,
    g0,
    g1,
    g2,
    g_dim,
    x0,
    x1,
    x2,
    x_dim,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)[None, :].to(tl.int64)  # features may lie far apart
    inside = (row < rows)[:, None] & (column < dim)
    x = tl.load(x_ptr + _row_offset(row, size1, size2, x0, x1, x2) + column * x_dim, mask=inside, other=0).to(WIDE)
    grad = tl.load(grad_ptr + _row_offset(row, size1, size2, g0, g1, g2) + column * g_dim, mask=inside, other=0)
    grad = grad.to(WIDE)
    inverse = _inverse_norm(x)  # [R, 1]
    unit = x * inverse
    along = tl.sum(grad * unit, axis=1)[:, None]  # [R, 1]: the part along x, which a unit vector does not feel
    out = (grad - unit * along) * inverse
    tl.store(out_ptr + row.to(tl.int64)[:, None] * dim + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(kernel: Any, like: Tensor, *inputs: Tensor) -> Tensor:
    """Run `kernel` over the rows of `inputs`, all of the shape of `like`, in the order in which its rows lie."""
    out = empty_rows(like)
    order, _ = memory_order(like.stride())
    dim = like.shape[-1]
    outer = order[:-1]
    sizes, strides = merge_axes([like.shape[a] for a in outer], *([t.stride(a) for a in outer] for t in inputs))
    if len(sizes) > 3:  # five axes and more of which no two are one in memory
        inputs = tuple(t.permute(order).contiguous() for t in inputs)
        sizes, strides = [like.numel() // dim], [[dim] for _ in inputs]
    missing = 3 - len(sizes)
    sizes = [1] * missing + sizes
    width = triton.next_power_of_2(dim)
    rows = like.numel() // dim
    block = max(1, TILE // width)
    wide = tl.float64 if like.dtype == torch.float64 else tl.float32
    numbers = [n for t, stride in zip(inputs, strides, strict=True) for n in [0] * missing + stride + [t.stride(-1)]]
    with torch.cuda.device_of(like):
        kernel[(triton.cdiv(rows, block),)](
            *inputs, out, rows, dim, sizes[1], sizes[2], *numbers, WIDE=wide, ROWS=block, DIM=width, num_warps=4
        )
    return out


def forward(x: Tensor) -> Tensor:
    """x / ‖x‖₂ for x [..., D] that `applies` accepts."""
    return _launch(_forward_kernel, x, x)


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient for x [..., D], given that for its unit vectors."""
    return _launch(_backward_kernel, x, grad, x)


# The same as registered operators, opaque to tracers, for torch.compile and torch.export.


@torch.library.custom_op("quest_core::unit", mutates_args=())
def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis, [..., D], as an operator that torch.compile and torch.export keep whole."""
    return forward(x)


@torch.library.custom_op("quest_core::unit_backward", mutates_args=())
def unit_backward(grad: Tensor, x: Tensor) -> Tensor:
    """`backward` as an operator."""
    return backward(grad, x)


@unit.register_fake
def _(x: Tensor) -> Tensor:
    return empty_rows(x)


@unit_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return empty_rows(x)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derive(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = unit_backward(grad, *ctx.saved_tensors)
    return result


unit.register_autograd(_derive, setup_context=_setup)
