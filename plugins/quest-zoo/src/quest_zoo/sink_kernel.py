"""Softmax attention with a sink by PyTorch's kernel for CPUs, which returns the sums of the exponentials too."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from quest_core.compat import autocast_dtype, is_eager

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class ScaledDotProductSink(torch.autograd.Function):  # quest_core names second derivatives of nodes of such names
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, *how: Any) -> Tensor:
        mask, is_causal, scale = how
        out, sums = getattr(torch.ops.aten, KERNEL)(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        sums = sums.unsqueeze(-1)  # log Σ exp(l) without the sink [B, H, N, 1]
        out *= (sums - sink).sigmoid_().to(out.dtype)
        ctx.save_for_backward(q, k, v, out, sums, sink, mask)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, sink, mask = ctx.saved_tensors
        total = torch.logaddexp(sums, sink.to(sums))  # with the sink
        # Of an output and a sum with the sink, the kernel makes the gradients with the sink.
        derive, how = getattr(torch.ops.aten, f"{KERNEL}_backward"), {"attn_mask": mask, "scale": ctx.scale}
        grads = derive(grad, q, k, v, out, total.squeeze(-1), 0.0, ctx.is_causal, **how)
        own = None
        if ctx.needs_input_grad[3]:
            own = -((sink - total).exp() * (grad * out).sum(-1, keepdim=True)).sum((0, 2), keepdim=True)[0]
        return *grads, own, None, None, None


def attend_with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, mask: Tensor | None, is_causal: bool, **how: Any
) -> Tensor | None:
    """Return scaled_dot_product_attention with one more logit per head, whose weight goes to no value.

    The kernel's operator is private: PyTorch's public function does not return the sums.

    Args:
        sink: the logits, [H, 1, 1] or less.
        how: `scale` and `enable_gqa`.

    Returns:
        [B, H, N, D], or None where PyTorch would not take that kernel.
    """
    if not (is_eager() and type(q) is Tensor and q.is_cpu and hasattr(torch.ops.aten, KERNEL)):
        return None
    lower = autocast_dtype("cpu")
    if lower is not None and q.dtype != torch.float64:
        q, k, v = (x.to(lower) for x in (q, k, v))
    if mask is not None:
        mask = (torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask).to(q.dtype)
    if torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, **how) != SDPBackend.FLASH_ATTENTION.value:
        return None
    apply: Callable[..., Tensor] = ScaledDotProductSink.apply
    return apply(q, k, v, sink, mask, is_causal, how["scale"])
