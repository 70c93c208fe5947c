"""Unit vectors, x / ‖x‖₂ over the last axis: the whole cost of QUEST beside the attention itself.

Reference: :func:`quest_core.mechanisms.reference.unit`. Norms are accumulated in float32 or wider. A vector whose
norm is zero (or underflows to zero) becomes zero, with a zero gradient.

Three paths compute the same:

- traced (torch.compile, torch.export, functorch): plain operations, which the compiler fuses;
- CPU, float32/float64/bfloat16: PyTorch's own fused weight-norm kernel, one pass forward and one backward, run over
  the rows in the order in which they lie in memory, so that the usual [B, N, H, D] layout is not copied;
- everything else: plain operations with a backward of three passes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .mode import mode

FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis, zero where the norm is zero.

    Args:
        x: [..., D], floating point, any strides.

    Returns:
        [..., D] in the dtype of `x`.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _plain(x)
    return _Unit.apply(x)  # type: ignore[no-any-return]


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / ‖x‖, 0 for a zero vector: [..., D] -> [..., 1], float32 or wider."""
    accumulate = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulate)  # [..., 1]
    # The inner `where` keeps the branch that is not taken finite, so that its gradient is 0 and not 0·inf.
    return torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)


def _plain(x: Tensor) -> Tensor:
    return (x * _inverse_norm(x)).to(x.dtype)


@functools.cache
def _has_fused() -> bool:
    return hasattr(torch.ops.aten, "_weight_norm_interface") and hasattr(
        torch.ops.aten, "_weight_norm_interface_backward"
    )


def _memory_order(x: Tensor) -> tuple[list[int], list[int]]:
    """The permutation that makes a dense tensor contiguous (last axis kept last), and its inverse."""
    order = [*sorted(range(x.dim() - 1), key=x.stride().__getitem__, reverse=True), x.dim() - 1]
    inverse = [0] * len(order)
    for position, axis in enumerate(order):
        inverse[axis] = position
    return order, inverse


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.fused = (
            mode() == "auto" and x.device.type == "cpu" and x.dtype in FUSED_DTYPES and x.numel() > 0 and _has_fused()
        )
        if not ctx.fused:
            inverse = _inverse_norm(x)  # [..., 1]
            ctx.save_for_backward(x, inverse)
            scaled: Tensor = (x * inverse).to(x.dtype)
            return scaled
        order, ctx.back = _memory_order(x)
        rows = x.permute(order).reshape(-1, x.shape[-1]).contiguous()  # [R, D]; copies only a slice of a packed tensor
        ones = x.new_ones(rows.shape[0], 1)  # [R, 1]
        out, norm = torch.ops.aten._weight_norm_interface(rows, ones, 0)  # [R, D], [R, 1]
        ctx.order, ctx.zero = order, None
        if not norm.all():
            ctx.zero = norm == 0
            out.masked_fill_(ctx.zero, 0)
        ctx.save_for_backward(rows, ones, norm)
        return out.view([x.shape[axis] for axis in order]).permute(ctx.back)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not ctx.fused:
            x, inverse = ctx.saved_tensors
            wide_grad, wide_x = grad.to(inverse.dtype), x.to(inverse.dtype)
            along = (wide_grad * wide_x).sum(-1, keepdim=True) * inverse * inverse  # [..., 1]: the part along x
            across: Tensor = (torch.addcmul(wide_grad, wide_x, along, value=-1) * inverse).to(x.dtype)
            return across
        rows, ones, norm = ctx.saved_tensors
        grad = grad.permute(ctx.order)
        grad_rows = grad.reshape(rows.shape).contiguous()  # [R, D]
        out = torch.ops.aten._weight_norm_interface_backward(grad_rows, rows, ones, norm, 0)[0]  # [R, D]
        if ctx.zero is not None:
            out = out.masked_fill(ctx.zero, 0)
        return out.view(grad.shape).permute(ctx.back)  # type: ignore[no-any-return]
