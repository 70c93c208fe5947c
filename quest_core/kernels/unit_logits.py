"""QUEST in one step on a CPU where its logits are formed, because somebody reads them or tokens are few.

`unit_logits` gives the logits q k̄ᵀ; `unit_attention` the softmax over them and the output as well. Reference:
:func:`quest_core.mechanisms.reference.quest`. Normalising and multiplying one after the other makes a dozen small steps
of automatic differentiation and keeps the raw keys for the backward pass. Here unit keys and norms are kept, the keys
are laid out once as the product wants them, and the backward pass multiplies in the order in which the gradient comes
out as the norm wants it. ``benchmarks/unit_logits.py`` times both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .mode import mode


def unit_logits_applies(q: Tensor, k: Tensor, residual: Tensor | None = None) -> bool:
    """Whether `unit_logits` can compute these logits, and is expected to be fastest."""
    return (
        q.is_cpu
        and q.dtype in (torch.float32, torch.float64)
        and (residual is None or residual.shape == (*q.shape[:3], k.shape[2]))
        and not torch.compiler.is_compiling()
        and (are_ordinary(q, k) if residual is None else are_ordinary(q, k, residual))
        and mode() == "auto"
    )


def are_ordinary(*tensors: Tensor) -> bool:
    """Whether these are tensors of one type and none a subclass or empty, outside of functorch, autocast and
    torch.jit.trace, which could not save it: what a step with a derivative of its own can take for what it is."""
    first = tensors[0].dtype
    for x in tensors:
        if type(x) is not Tensor or x.dtype != first or x.numel() == 0:
            return False
    return is_plain_call()


def is_plain_call() -> bool:
    """Whether this runs outside of functorch, of autocast on CPUs and of torch.jit.trace."""
    return not (
        torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
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


def unit_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale · q k̄ᵀ) v, where `unit_logits_applies` and v is one of the tensors that `are_ordinary`.

    Args:
        q: [B, H, N, D].
        k: [B, G, M, D], H a multiple of G.
        v: [B, G, M, Dv], of the type of `q`.

    Returns:
        [B, H, N, Dv].
    """
    out: Tensor = _unit_attention(q if scale == 1 else q * scale, k, v, None, True)
    return out


def unit_attention_with_logits(
    q: Tensor, k: Tensor, v: Tensor, scale: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `unit_attention`, and its weights and logits.

    Args:
        residual: [B, H, N, M], added to the logits.

    Returns:
        The output [B, H, N, Dv], the weights and the logits, both [B, H, N, M]; gradients flow through each to what it
        is made of.
    """
    made: tuple[Tensor, Tensor, Tensor] = _unit_attention(q if scale == 1 else q * scale, k, v, residual, False)
    return made


class _UnitLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, residual: Tensor | None) -> Tensor:
        queries, keys, inverse, scores = _logits(q, k, residual)
        ctx.save_for_backward(queries, keys, inverse)
        return scores if q.shape[1] == k.shape[1] else own(scores, (*q.shape[:3], k.shape[2]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _refuse_a_second_derivative()
        needs_q, needs_k, needs_residual = ctx.needs_input_grad
        queries, keys, inverse = ctx.saved_tensors
        for_q, for_k = _for_inputs(grad, queries, keys, inverse, needs_q, needs_k)
        return for_q, for_k, grad if needs_residual else None


class _UnitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, residual: Tensor | None, output_alone: bool
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        out, weights, scores, saved = attended(q, k, v, residual)
        if q.shape[1] != k.shape[1]:
            (batch, heads, n, _), m = q.shape, k.shape[2]
            out, weights = own(out, (batch, heads, n, v.shape[3])), own(weights, (batch, heads, n, m))
            scores = scores if output_alone else own(scores, (batch, heads, n, m))
        # The weights are saved as they are returned, so that a change in place is noticed.
        ctx.save_for_backward(*saved, weights)
        ctx.set_materialize_grads(False)
        if output_alone:
            return out
        for_q, for_k, _, for_residual, _ = ctx.needs_input_grad
        if not (for_q or for_k or for_residual):
            ctx.mark_non_differentiable(weights, scores)  # values alone have a derivative
        return out, weights, scores

    @staticmethod
    def backward(
        ctx: Any, for_out: Tensor | None, for_weights: Tensor | None = None, for_scores: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        needs = ctx.needs_input_grad[:4]
        return *for_attended(ctx.saved_tensors, needs, for_out, for_weights, for_scores), None


def attended(
    q: Tensor, k: Tensor, v: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The output [B, G, H/G·N, Dv], the weights and the logits [B, G, H/G·N, M], and what the derivative needs beside
    the weights."""
    queries, keys, inverse, scores = _logits(q, k, residual)
    values = v.contiguous()  # [B, G, M, Dv]
    weights = scores.softmax(-1)  # [B, G, H/G·N, M]
    return torch.matmul(weights, values), weights, scores, (queries, keys, inverse, values)


def for_attended(
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    for_out: Tensor | None,
    for_weights: Tensor | None,
    for_scores: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q [B, H, N, D], k [B, G, M, D], v [B, G, M, Dv] and the residual [B, H, N, M].

    Args:
        saved: what `attended` says, and the weights [B, H, N, M].
        needs: which of the four are wanted; the others are None.
        for_out: the gradient of the output [B, H, N, Dv]; None where it is not used, as with the other two.
        for_weights: of the weights [B, H, N, M].
        for_scores: of the logits [B, H, N, M].
    """
    _refuse_a_second_derivative()
    queries, keys, inverse, values, weights = saved
    needs_q, needs_k, needs_v, needs_residual = needs
    shape, (batch, groups, m, dim) = weights.shape, values.shape
    rows = batch * groups
    values, weights = values.view(rows, m, dim), weights.view(rows, -1, m)  # [B·G, M, Dv], [B·G, H/G·N, M]
    for_v = grad = None  # the latter of the weights, then of the logits, [B·G, H/G·N, M]
    if for_out is not None:
        inside = for_out.reshape(rows, -1, dim)  # [B·G, H/G·N, Dv]
        if needs_v:
            for_v = torch.bmm(weights.mT, inside).view(batch, groups, m, dim)
        if needs_q or needs_k or needs_residual:
            grad = torch.bmm(inside, values.mT)
    if for_weights is not None:
        direct = for_weights.reshape(weights.shape)
        grad = direct if grad is None else grad.add_(direct)
    if grad is not None:
        grad = torch._softmax_backward_data(grad, weights, -1, weights.dtype)
    if for_scores is not None:
        direct = for_scores.reshape(weights.shape)
        grad = direct if grad is None else grad.add_(direct)
    if grad is None:
        return None, None, for_v, None
    grad = grad.view(shape)
    for_q, for_k = _for_inputs(grad, queries, keys, inverse, needs_q, needs_k)
    return for_q, for_k, for_v, grad if needs_residual else None


def _logits(q: Tensor, k: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [B, G, H/G·N, D], unit keys [B, G, M, D], inverse norms [B·G·M, 1] and logits [B, G, H/G·N, M].

    All are contiguous, and the logits no view. (A call of torch.ops from Python costs more than some of these steps.)
    """
    batch, groups, m, dim = k.shape
    queries = q.contiguous().view(batch, groups, -1, dim)
    rows = k.reshape(-1, dim)  # [B·G·M, D]
    unit_rows, norm = torch._weight_norm_interface(rows, rows.new_ones(len(rows), 1), 0)
    inverse = norm.reciprocal()
    if not norm.all():
        unit_rows.masked_fill_(norm == 0, 0)
        inverse.masked_fill_(norm == 0, 0)
    keys = unit_rows.view(batch, groups, m, dim)
    if residual is None:
        return queries, keys, inverse, torch.matmul(queries, keys.mT)
    scores = torch.baddbmm(residual.reshape(batch * groups, -1, m), queries.flatten(0, 1), keys.flatten(0, 1).mT)
    return queries, keys, inverse, own(scores, (batch, groups, queries.shape[2], m))


def own(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` in another shape, no view: the caller may change what a function returns, as that of any other attention."""
    made: Tensor = torch.ops.aten._unsafe_view.default(x, shape)
    return made


def _for_inputs(
    grad: Tensor, queries: Tensor, keys: Tensor, inverse: Tensor, needs_q: bool, needs_k: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of q [B, H, N, D] and of the raw keys [B, G, M, D], given that of the logits [B, H, N, M]."""
    batch, groups, m, dim = keys.shape
    keys, queries = keys.flatten(0, 1), queries.flatten(0, 1)
    inside = grad.reshape(batch * groups, -1, m)  # [B·G, H/G·N, M]
    for_q = torch.bmm(inside, keys).view(*grad.shape[:3], dim) if needs_q else None
    if not needs_k:
        return for_q, None
    for_unit = torch.bmm(inside.mT, queries)  # [B·G, M, D]
    # The kernel's derivative of g·v/‖v‖ with v a unit vector and g = 1/‖k‖ is the derivative of k/‖k‖.
    for_k: Tensor = torch.ops.aten._weight_norm_interface_backward.default(
        for_unit.view(-1, dim), keys.view(-1, dim), inverse, torch.ones_like(inverse), 0
    )[0]
    return for_q, for_k.view(batch, groups, m, dim)


def _refuse_a_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "this fast path has no second derivative; to differentiate twice, set QUEST_KERNELS=reference and call the "
            "model in torch.nn.attention.sdpa_kernel(SDPBackend.MATH), for PyTorch's fused attention has none either"
        )


# `Function.apply` would ask for functorch's transforms once more, which whoever calls this has ruled out.
_unit_logits: Callable[[Tensor, Tensor, Tensor | None], Tensor] = super(torch.autograd.Function, _UnitLogits).apply
_unit_attention: Callable[..., Any] = super(torch.autograd.Function, _UnitAttention).apply
