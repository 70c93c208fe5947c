"""Softmax attention with a sink by PyTorch's kernel for CPUs, which returns the sums of the exponentials too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quest_core.compat import autocast_dtype, is_eager


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and log Σ exp(l) without the sink [B, H, N, 1]."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    sums = sums.unsqueeze(-1)
    out *= (sums - sink).sigmoid_().to(out.dtype)
    return out, sums


class ScaledDotProductSink(torch.autograd.Function):  # quest_core names second derivatives of nodes of such names
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, is_causal: bool, scale: float) -> Tensor:
        out, sums = attend(q, k, v, sink, is_causal, scale)
        ctx.save_for_backward(q, k, v, out, sums, sink)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, sink = ctx.saved_tensors
        total = torch.logaddexp(sums, sink.to(sums))  # with the sink
        # Of an output and a sum with the sink, the kernel makes the gradients with the sink.
        derive = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = derive(grad, q, k, v, out, total.squeeze(-1), 0.0, ctx.is_causal, scale=ctx.scale)
        own = None
        if ctx.needs_input_grad[3]:
            own = -((sink - total).exp() * (grad * out).sum(-1, keepdim=True)).sum((0, 2), keepdim=True)[0]
        return *grads, own, None, None


def attend_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, is_causal: bool, scale: float) -> Tensor | None:
    """Return softmax attention with one more logit per head, whose weight goes to no value.

    The kernel's operator is private: PyTorch's public function does not return the sums.

    Args:
        q: [B, H, N, D], k and v: [B, H, M, D].
        sink: the logits, [H, 1, 1] or less.

    Returns:
        [B, H, N, D], or None where that kernel does not apply.
    """
    if not (is_eager() and torch.backends.cuda.flash_sdp_enabled() and autocast_dtype("cpu") is None and scale > 0):
        return None
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return None
    for x in (q, k, v):
        fits = type(x) is Tensor and x.is_cpu and x.dtype == q.dtype and x.shape[:2] == q.shape[:2]
        if not fits or x.shape[3] != q.shape[3] or x.stride(3) != 1 or min(x.stride()[:3]) < 2 or not x.numel():
            return None
    if is_causal and q.shape[2] not in (1, k.shape[2]):  # the kernel aligns causal masks at the first key
        return None
    is_causal = is_causal and q.shape[2] > 1
    if not torch.is_grad_enabled():
        return attend(q, k, v, sink, is_causal, scale)[0]
    apply: Callable[..., Tensor] = ScaledDotProductSink.apply
    return apply(q, k, v, sink, is_causal, scale)
