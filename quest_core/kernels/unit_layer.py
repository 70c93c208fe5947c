"""QUEST self-attention together with its projections, in one step on a CPU.

`unit_layer` is :func:`~quest_core.kernels.unit_logits.unit_attention` with the three projections before it. Where
tokens are few, a layer's time goes to calls, checks and the bookkeeping of differentiation as much as to arithmetic. In
one step there are none between projections and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .mode import mode
from .unit_logits import attended, for_attended, is_plain_call, own

LINEAR_FORWARD = nn.Linear.forward


def unit_layer_parameters(
    x: Tensor,
    projections: Sequence[nn.Module],
    num_heads: int,
    residual: Tensor | None = None,
    head_dim: int | None = None,
) -> tuple[Any, ...] | None:
    """What `unit_layer` takes of the projections of queries, keys and values: three weights, then three biases.

    None where it cannot stand for calling them and attending to what they give: they are no plain linear layers, do not
    make `num_heads` heads (of `head_dim` features each, where that is said), somebody has put something in the place of
    linear layers, or something is not an ordinary tensor on a CPU. Whether hooks watch them is for the caller to ask.
    """
    if type(x) is not Tensor or not x.is_cpu or torch.compiler.is_compiling():
        return None
    dtype, weights, biases = x.dtype, [], []
    for linear in projections:
        own_parameters = linear._parameters
        if type(linear) is not nn.Linear or "weight" not in own_parameters or "bias" not in own_parameters:
            return None  # FullyShardedDataParallel and pruning put other tensors in their place
        weight, bias = own_parameters["weight"], own_parameters["bias"]
        if type(weight) is not nn.Parameter or weight.dtype != dtype or not (bias is None or bias.dtype == dtype):
            return None
        weights.append(weight)
        biases.append(bias)
    if x.dim() != 3:
        return None
    batch, tokens, features = x.shape
    shape = width, _ = weights[0].shape
    value_width, value_features = weights[2].shape
    logits_shape = (batch, num_heads, tokens, tokens)
    if (
        dtype in (torch.float32, torch.float64)
        and shape == weights[1].shape
        and shape[1] == value_features == features
        and width % num_heads == value_width % num_heads == 0
        and (head_dim is None or width == value_width == num_heads * head_dim)
        and x.numel() > 0
        and (
            residual is None
            or (type(residual) is Tensor and residual.dtype == dtype and residual.shape == logits_shape)
        )
        and is_plain_call()
        and F.linear is torch._C._nn.linear
        and nn.Linear.forward is LINEAR_FORWARD
        and torch._C._len_torch_function_stack() == 0
        and mode() == "auto"
    ):
        return (*weights, *biases)
    return None


def is_hooked(*modules: nn.Module) -> bool:
    """Whether a call of one of the modules runs more than its class's `forward`, or another one."""
    for module in modules:
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        ):
            return True
    return bool(_has_any_global_hook())


def unit_layer(
    x: Tensor,
    parameters: Sequence[Tensor | None],
    num_heads: int,
    residual: Tensor | None = None,
    *,
    with_logits: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """softmax(q k̄ᵀ + residual) v of q, k, v = the projections of x.

    Args:
        x: [B, N, E].
        parameters: the `unit_layer_parameters`: weights [H·D, E] twice and [H·Dv, E], and biases.
        residual: [B, H, N, N], added to the logits.
        with_logits: return the weights and logits as well.

    Returns:
        The output with its heads side by side [B, N, H·Dv], and the weights and the logits [B, H, N, N] or None twice.
    """
    made = _unit_layer(x, residual, num_heads, with_logits, *parameters)
    return made if with_logits else (made, None, None)


class _UnitLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, num_heads: int, with_logits: bool, *parameters: Any
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        batch, tokens, features = x.shape
        rows = x.reshape(-1, features)  # [B·N, E]
        q, k, v = (
            F.linear(rows, weight, bias).view(batch, tokens, num_heads, -1).transpose(1, 2)  # [B, H, N, D]
            for weight, bias in zip(parameters[:3], parameters[3:], strict=True)
        )
        out, weights, scores, saved = attended(q, k, v, residual)
        merged = out.transpose(1, 2).flatten(2)  # [B, N, H·Dv]
        if merged._is_view():  # of one head or one token there was nothing to copy
            merged = own(merged, tuple(merged.shape))
        # Linear layers keep their input for the weight's sake and the weight for the input's.
        for_x, _, _, _, *for_parameters = ctx.needs_input_grad
        kept = (x if x.is_contiguous() else rows) if any(for_parameters[:3]) else None
        ctx.save_for_backward(kept, *(parameters[:3] if for_x else (None, None, None)), *saved, weights)
        ctx.set_materialize_grads(False)
        if not with_logits:
            return merged
        of_queries_and_keys = (*for_parameters[:2], *for_parameters[3:5])
        if not (for_x or ctx.needs_input_grad[1] or any(of_queries_and_keys)):
            ctx.mark_non_differentiable(weights, scores)  # values alone have a derivative
        return merged, weights, scores

    @staticmethod
    def backward(
        ctx: Any, for_merged: Tensor | None, for_weights: Tensor | None = None, for_scores: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        # [B, N, E] or [B·N, E]; [H·D, E] twice and [H·Dv, E]; what `for_attended` takes
        kept, weight_q, weight_k, weight_v, *saved = ctx.saved_tensors
        batch, num_heads, tokens, _ = saved[0].shape
        needs_x, needs_residual, _, _, *needs = ctx.needs_input_grad  # the last six: weights, then biases
        needs_projected = [needs_x or needs[i] or needs[i + 3] for i in range(3)]
        for_out = None
        if for_merged is not None:
            for_out = for_merged.reshape(batch, tokens, num_heads, -1).transpose(1, 2)  # [B, H, N, Dv]
        *for_heads, for_residual = for_attended(
            saved, (*needs_projected, needs_residual), for_out, for_weights, for_scores
        )
        # What the projections made, [B·N, H·D] twice and [B·N, H·Dv]
        sides = [None if grad is None else grad.transpose(1, 2).reshape(batch * tokens, -1) for grad in for_heads]
        for_x = None
        if needs_x:
            for side, weight in zip(sides, (weight_q, weight_k, weight_v), strict=True):
                if side is not None:
                    for_x = torch.mm(side, weight) if for_x is None else for_x.addmm_(side, weight)
            for_x = None if for_x is None else for_x.view(batch, tokens, -1)
        rows: Any = None if kept is None else kept.reshape(batch * tokens, -1)  # [B·N, E]
        return (
            *(for_x, for_residual, None, None),
            *(torch.mm(s.t(), rows) if n and s is not None else None for s, n in zip(sides, needs[:3], strict=True)),
            *(s.sum(0) if n and s is not None else None for s, n in zip(sides, needs[3:], strict=True)),
        )


# `Function.apply` would ask for functorch's transforms once more, which whoever calls this has ruled out.
_unit_layer: Callable[..., Any] = super(torch.autograd.Function, _UnitLayer).apply
