"""Unit vectors, x / ‖x‖₂ over the last axis: the whole cost of QUEST beside the attention itself.

Reference: :func:`quest_core.mechanisms.reference.unit`. Norms are accumulated in float32 or wider. A vector whose
norm is zero (or underflows to zero) becomes zero, with a zero gradient.

These paths compute the same (see :func:`quest_core.kernels.mode` for how to choose):

- traced (torch.compile, torch.export, functorch): plain operations, which the compiler fuses with their neighbours;
- CUDA, with Triton installed: a kernel of one pass forward and one backward over any strides (`unit_triton`); it is
  proven under Triton's interpreter and has not been measured on a GPU;
- CPU, float32/float64/bfloat16: PyTorch's own fused weight-norm kernel, one pass forward and one backward, run over
  the rows in the order in which they lie in memory, so that the usual [B, N, H, D] layout is not copied;
- everything else: plain operations with a backward of three passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .layout import memory_order
from .mode import HAS_TRITON, mode, triton_takes

FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis, zero where the norm is zero.

    Args:
        x: [..., D], floating point, any strides.

    Returns:
        [..., D] in the dtype of `x`.
    """
    if torch._C._are_functorch_transforms_active():
        return _plain(x)
    chosen = mode()
    if torch.compiler.is_compiling():
        return _operator(x) if triton_takes(x) else _plain(x)
    if chosen == "reference":
        return _plain(x)
    path = _path(x, chosen)
    return _weight_norm(x) if path == "weight norm" else _eager(x, path)


def _path(x: Tensor, chosen: str) -> str:
    """Which code computes eager unit vectors in mode `chosen`: "triton", "weight norm" or "plain"."""
    if chosen == "eager" or x.numel() == 0:
        return "plain"
    if triton_takes(x) or (x.is_cuda and HAS_TRITON):
        from . import unit_triton

        if unit_triton.applies(x):
            return "triton"
    return "weight norm" if x.is_cpu and x.dtype in FUSED_DTYPES and _has_fused() else "plain"


def _operator(x: Tensor) -> Tensor:
    from . import unit_triton

    out: Tensor = unit_triton.unit(x) if unit_triton.applies(x) else _plain(x)
    return out


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


def _weight_norm(x: Tensor) -> Tensor:
    """Through PyTorch's fused weight-norm kernel, whose derivative is as fused and needs no Python."""
    inside, back = x, None  # as it lies in memory, and the way back
    if not x.is_contiguous():
        order, back = memory_order(x.stride())
        inside = x.permute(order)
    rows = inside.reshape(-1, x.shape[-1]).contiguous()  # [R, D]; a view, but for slices of a packed tensor
    out, norm = torch.ops.aten._weight_norm_interface(rows, rows.new_ones(rows.shape[0], 1), 0)  # [R, D], [R, 1]
    if not norm.all():
        return _eager(x, "plain")  # the kernel divides by the norm of a zero vector
    unit_inside: Tensor = out.view(inside.shape)
    return unit_inside if back is None else unit_inside.permute(back)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, path: str) -> Tensor:
        ctx.path = path
        if path == "triton":
            from . import unit_triton

            ctx.save_for_backward(x)
            return unit_triton.forward(x)
        inverse = _inverse_norm(x)  # [..., 1]
        ctx.save_for_backward(x, inverse)
        scaled: Tensor = (x * inverse).to(x.dtype)
        return scaled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.path == "triton":
            from . import unit_triton

            return unit_triton.backward(grad, *ctx.saved_tensors), None
        x, inverse = ctx.saved_tensors
        wide = grad.to(inverse.dtype, copy=True)
        along = (wide * x).sum(-1, keepdim=True) * inverse * inverse  # [..., 1]: the part along x
        across: Tensor = wide.addcmul_(x, along, value=-1).mul_(inverse).to(x.dtype)
        return across, None


_eager: Callable[[Tensor, str], Tensor] = _Unit.apply
