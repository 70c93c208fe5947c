"""Unit vectors, x / ‖x‖₂ over the last axis: the whole cost of QUEST except the attention itself.

Reference: :func:`quest_core.testing.references.unit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .pytorch import is_eager, may_read, wider


def unit(x: Tensor) -> Tensor:
    """Return x / ‖x‖₂ over the last axis; a zero vector stays zero and has a zero gradient.

    Args:
        x: [..., D], floating point, any strides.

    Returns:
        [..., D] in the dtype of `x`.
    """
    eager = is_eager()
    # The heads of a projection [B, N, H, D] are taken in the order of memory.
    turned = eager and x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
    x = x.transpose(1, 2) if turned else x
    # The derivative written by hand takes half the passes of the recorded one.
    by_hand = eager and x.requires_grad and torch.is_grad_enabled()
    # A result is laid out like the first factor: contiguous, whatever x is. That takes a third of the time.
    out: Tensor = _unit(x)[0] if by_hand else (inverse_norm(x, eager) * x).to(x.dtype)
    return out.transpose(1, 2) if turned else out


def inverse_norm(x: Tensor, eager: bool) -> Tensor:
    """Return 1 / ‖x‖₂ over the last axis, 0 for a zero vector: [..., D] -> [..., 1], float32 or wider.

    The squares are summed in a type that they neither overflow nor underflow: float32 for float16, and in `eager` code
    for norms that prove to be moderate, else float64. Apple GPUs have none: there, norms of 1e-19 to 1e19 are right.
    """
    narrow, quick = x.dtype == torch.float16 or x.device.type == "mps", None
    if not narrow and eager and may_read(x):  # a CPU takes up to four times as long for the sum in float64
        quick = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wider(x.dtype))
        least, most = torch.aminmax(quick)
        if least.item() > 1e-10 and most.item() < 1e10:  # neither zero nor NaN
            return torch.reciprocal(quick)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32 if narrow else torch.float64)
    # Below the least normal float32 a norm counts as zero: its reciprocal would overflow. 1/inf and its derivatives are
    # 0. The number stands here because torch.compile takes a float of the module for an input, and compiles twice.
    inverse = norm.masked_fill(norm <= torch.finfo(torch.float32).tiny, math.inf).reciprocal().to(wider(x.dtype))
    # No vector depends on whether another one is moderate.
    return inverse if quick is None else torch.where((quick > 1e-10) & (quick < 1e10), quick.reciprocal(), inverse)


class _Unit(torch.autograd.Function):
    """`unit` and `inverse_norm` of x; both are returned so that the derivative, made of them, has a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = inverse_norm(x, True)  # [..., 1]
        out = (inverse * x).to(x.dtype)
        ctx.save_for_backward(out, inverse)
        ctx.set_materialize_grads(False)
        return out, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_inverse: Tensor | None) -> Tensor | None:
        out, inverse = ctx.saved_tensors
        wide = out.to(inverse.dtype)
        total = None
        if grad is not None:  # d x̄ = (dx − (dx·x̄) x̄) / ‖x‖
            along = inverse * (wide * grad).sum(-1, keepdim=True)  # [..., 1]
            scaled = inverse * grad  # in the memory that the product has just left: new pages take longer than the sum
            subtract = scaled.addcmul if torch.is_grad_enabled() else scaled.addcmul_
            total = subtract(wide, along, value=-1)
        if grad_inverse is not None:  # d 1/‖x‖ = −(dx·x̄) / ‖x‖²
            change = -grad_inverse * inverse.square() * wide
            total = change if total is None else total + change
        return None if total is None else total.to(out.dtype)


_unit: Callable[[Tensor], tuple[Tensor, Tensor]] = _Unit.apply
