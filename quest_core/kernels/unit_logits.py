"""q k̄ᵀ in one step on a CPU: the logits of QUEST where they are formed, because somebody reads them or tokens are few.

Reference: :func:`quest_core.mechanisms.reference.quest`. Normalising and multiplying one after the other makes a dozen
small steps of automatic differentiation and keeps the raw keys for the backward pass. Here unit keys and norms are
kept, the keys are laid out once as the product wants them, and the backward pass multiplies in the order in which the
gradient comes out as the norm wants it. At 29 tokens the core of attention, forward and backward, takes 1.06
of standard attention's time, and 1.15 as separate operations (AMD EPYC, one core; benchmarks/unit_logits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .mode import mode


def unit_logits_applies(q: Tensor, k: Tensor, residual: Tensor | None = None) -> bool:
    """Whether `unit_logits` can compute these logits, and is expected to be fastest."""
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.float64)
        and k.dtype == q.dtype
        and type(q) is type(k) is Tensor
        and q.numel() > 0
        and k.numel() > 0
        and (residual is None or (residual.dtype == q.dtype and residual.shape == (*q.shape[:3], k.shape[2])))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
        and mode() == "auto"
    )


def unit_logits(q: Tensor, k: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """scale · q k̄ᵀ (+ residual), k̄ = k / ‖k‖₂, zero where the norm is zero.

    Args:
        q: [B, H, N, D].
        k: [B, G, M, D], H a multiple of G.
        residual: [B, H, N, M].

    Returns:
        [B, H, N, M].
    """
    return _unit_logits(q if scale == 1 else q * scale, k, residual)


class _UnitLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, residual: Tensor | None) -> Tensor:
        (batch, heads, n, dim), (groups, m) = q.shape, k.shape[1:3]
        queries = q.reshape(batch * groups, heads // groups * n, dim)  # [B·G, H/G·N, D]
        rows = k.reshape(-1, dim)  # [B·G·M, D]
        unit_rows, norm = torch.ops.aten._weight_norm_interface(rows, rows.new_ones(len(rows), 1), 0)
        inverse = norm.reciprocal()  # [B·G·M, 1]
        if not norm.all():
            unit_rows.masked_fill_(norm == 0, 0)
            inverse.masked_fill_(norm == 0, 0)
        keys = unit_rows.view(batch * groups, m, dim)  # [B·G, M, D]
        ctx.save_for_backward(queries, keys, inverse)
        if residual is None:
            scores = torch.bmm(queries, keys.mT)  # [B·G, H/G·N, M]
        else:
            scores = torch.baddbmm(residual.reshape(batch * groups, -1, m), queries, keys.mT)
        return scores.view(batch, heads, n, m)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "this fast path has no second derivative; set QUEST_KERNELS=reference to differentiate twice"
            )
        queries, keys, inverse = ctx.saved_tensors
        needs_q, needs_k, needs_residual = ctx.needs_input_grad
        (batch, heads, n, m), (rows, _, dim) = grad.shape, keys.shape
        inside = grad.reshape(rows, -1, m)  # [B·G, H/G·N, M]
        for_q = torch.bmm(inside, keys).view(batch, heads, n, dim) if needs_q else None
        for_k = None
        if needs_k:
            for_unit = torch.bmm(inside.mT, queries)  # [B·G, M, D]
            # The kernel's derivative of g·v/‖v‖ with v a unit vector and g = 1/‖k‖ is the derivative of k/‖k‖.
            flat, ones = keys.view(-1, dim), torch.ones_like(inverse)
            for_k, _ = torch.ops.aten._weight_norm_interface_backward(for_unit.view(-1, dim), flat, inverse, ones, 0)
            for_k = for_k.view(batch, -1, m, dim)
        return for_q, for_k, grad if needs_residual else None


_unit_logits: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _UnitLogits.apply
