"""The Triton kernels of `short`. Import them only where `mode.triton_takes` holds.

A row's logits are bounded before any is known: |scale · q·k̄| ≤ |scale|·‖q‖. That bound takes the place of the running
maximum, so nothing is ever rescaled. It is safe while exp(−2·bound), the smallest weight a row's best key can get, is a
normal number; a block of queries with a larger bound looks for its true maxima first, in one more pass over the keys.

Logits are kept in units of log 2, for the hardware has 2^x. Heads of all samples are the first axis of a grid, which
alone may be longer than 65535.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
# Inside a Triton kernel nothing has a Python type.

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import empty_rows

LOG2E = math.log2(math.e)
# Most queries, and most keys, in a tile. With 128 features, float32 tiles of 64 would outgrow shared memory.
BLOCK = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
# exp(−2·bound) is multiplied with values in the type of the values: it must be normal there, and in float32.
LIMIT = {torch.float16: 4.0 * LOG2E, torch.bfloat16: 40.0 * LOG2E, torch.float32: 40.0 * LOG2E}


@triton.jit
def _tile(ptr, row, rows, stride, dim, stride_dim, DIM: tl.constexpr):
    """Rows `row` of a matrix, [R, DIM], zero outside of it."""
    column = tl.arange(0, DIM)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * stride + column.to(tl.int64) * stride_dim
    return tl.load(at, mask=(row < rows)[:, None] & (column < dim), other=0)


@triton.jit
def _put(ptr, x, row, rows, stride, dim, DIM: tl.constexpr):
    """Write [R, DIM] to rows `row` of a matrix whose last axis has no gaps."""
    column = tl.arange(0, DIM)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * stride + column
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < dim))


@triton.jit
def _inverse_norm(k):
    """[R, D] -> 1 / ‖k‖ or 0, [R], float32."""
    norm = tl.sqrt_rn(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1))
    return tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)


@triton.jit
def _logits(q, k, inverse, scale, i, j, n, m, mask, mask_m, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """scale · q k̄ᵀ in units of log 2, [BN, BM], −inf where unseen; the norm is applied to the product."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (inverse * scale)[None, :]
    seen = (j < m)[None, :]
    if MASKED:
        seen = seen & (tl.load(mask + j * mask_m, mask=j < m, other=0) != 0)[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None] + (m - n))
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def _statistics(shift_ptr, total_ptr, at, inside):
    """What turns logits into weights: the shift and 1 / Σ of each row, [BN] each; 0 makes blind rows weigh nothing."""
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    some = total > 0
    return tl.load(shift_ptr + at, mask=inside, other=0.0), tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, shift_ptr, total_ptr,
    heads, share, n, m, dim, v_dim, scale, limit,
    q_b, q_h, q_n, q_d, k_b, k_h, k_m, k_d, v_b, v_h, v_m, v_d, mask_b, mask_m, o_b, o_h, o_n,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    k_ptr += b * k_b + (h // share) * k_h
    v_ptr += b * v_b + (h // share) * v_h
    mask_ptr += b * mask_b
    q = _tile(q_ptr + b * q_b + h * q_h, i, n, q_n, dim, q_d, BD)
    shift = tl.sqrt_rn(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)) * tl.abs(scale)  # [BN]
    q = q.to(DOT)
    last = m
    if CAUSAL:
        last = tl.minimum(m, tl.program_id(1) * BN + BN + m - n)
    if not (tl.max(shift, axis=0) <= limit):
        top = tl.full([BN], float("-inf"), tl.float32)
        for start in range(0, last, BM):
            j = start + tl.arange(0, BM)
            k = _tile(k_ptr, j, m, k_m, dim, k_d, BD)
            logits = _logits(q, k.to(DOT), _inverse_norm(k), scale, i, j, n, m, mask_ptr, mask_m, MASKED, CAUSAL)
            top = tl.maximum(top, tl.max(logits, axis=1))
        shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.zeros([BN], tl.float32)
    total_rounded = tl.zeros([BN], tl.float32)
    out = tl.zeros([BN, BV], tl.float32)
    for start in range(0, last, BM):
        j = start + tl.arange(0, BM)
        k = _tile(k_ptr, j, m, k_m, dim, k_d, BD)
        v = _tile(v_ptr, j, m, v_m, v_dim, v_d, BV)
        logits = _logits(q, k.to(DOT), _inverse_norm(k), scale, i, j, n, m, mask_ptr, mask_m, MASKED, CAUSAL)
        weight = tl.exp2(logits - shift[:, None])
        rounded = weight.to(v.dtype)
        total += tl.sum(weight, axis=1)
        total_rounded += tl.sum(rounded.to(tl.float32), axis=1)
        out = tl.dot(rounded.to(DOT), v.to(DOT), out, input_precision="ieee")
    # The weights as they were multiplied sum to 1: a row with one loud key returns its value exactly, although the
    # bound, unlike the maximum, does not make that key's weight 1 before division.
    out = out / tl.where(total_rounded > 0, total_rounded, 1.0)[:, None]
    _put(out_ptr + b * o_b + h * o_h, out, i, n, o_n, v_dim, BV)
    at = tl.program_id(0).to(tl.int64) * n + i
    tl.store(shift_ptr + at, shift, mask=i < n)
    tl.store(total_ptr + at, total, mask=i < n)


@triton.jit
def _query_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, shift_ptr, total_ptr, delta_ptr, dq_ptr,
    heads, share, n, m, dim, v_dim, scale, natural,
    g_b, g_h, g_n, g_d, q_b, q_h, q_n, q_d, k_b, k_h, k_m, k_d, v_b, v_h, v_m, v_d, mask_b, mask_m, o_b, o_h, o_n,
    dq_b, dq_h, dq_n,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries of one head, and Σ grad · out of each row for `_key_kernel`."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    k_ptr += b * k_b + (h // share) * k_h
    v_ptr += b * v_b + (h // share) * v_h
    mask_ptr += b * mask_b
    q = _tile(q_ptr + b * q_b + h * q_h, i, n, q_n, dim, q_d, BD).to(DOT)
    grad = _tile(grad_ptr + b * g_b + h * g_h, i, n, g_n, v_dim, g_d, BV)
    out = _tile(out_ptr + b * o_b + h * o_h, i, n, o_n, v_dim, 1, BV)
    at = tl.program_id(0).to(tl.int64) * n + i
    shift, inverse_total = _statistics(shift_ptr, total_ptr, at, i < n)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)  # [BN]
    tl.store(delta_ptr + at, delta, mask=i < n)
    last = m
    if CAUSAL:
        last = tl.minimum(m, tl.program_id(1) * BN + BN + m - n)
    dq = tl.zeros([BN, BD], tl.float32)
    for start in range(0, last, BM):
        j = start + tl.arange(0, BM)
        k = _tile(k_ptr, j, m, k_m, dim, k_d, BD)
        v = _tile(v_ptr, j, m, v_m, v_dim, v_d, BV)
        inverse = _inverse_norm(k)
        logits = _logits(q, k.to(DOT), inverse, scale, i, j, n, m, mask_ptr, mask_m, MASKED, CAUSAL)
        weight = tl.exp2(logits - shift[:, None]) * inverse_total[:, None]
        slope = weight * (tl.dot(grad.to(DOT), tl.trans(v.to(DOT)), input_precision="ieee") - delta[:, None])
        # The norm goes to the key here: on the slope, that of a tiny float16 key would overflow.
        unit = (k.to(tl.float32) * inverse[:, None]).to(k.dtype).to(DOT)
        dq = tl.dot(slope.to(k.dtype).to(DOT), unit, dq, input_precision="ieee")
    _put(dq_ptr + b * dq_b + h * dq_h, dq * natural, i, n, dq_n, dim, BD)


@triton.jit
def _key_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, shift_ptr, total_ptr, delta_ptr, dk_ptr, dv_ptr,
    heads, share, n, m, dim, v_dim, scale, natural,
    g_b, g_h, g_n, g_d, q_b, q_h, q_n, q_d, k_b, k_h, k_m, k_d, v_b, v_h, v_m, v_d, mask_b, mask_m,
    dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, DOT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values of one key/value head, over all the queries that may see it."""
    groups = heads // share
    b, g = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    j = tl.program_id(1) * BM + tl.arange(0, BM)
    mask_ptr += b * mask_b
    k = _tile(k_ptr + b * k_b + g * k_h, j, m, k_m, dim, k_d, BD)
    v = _tile(v_ptr + b * v_b + g * v_h, j, m, v_m, v_dim, v_d, BV)
    inverse = _inverse_norm(k)
    first = 0
    if CAUSAL:
        first = tl.maximum(0, tl.program_id(1) * BM + n - m) // BN * BN
    dk = tl.zeros([BM, BD], tl.float32)
    dv = tl.zeros([BM, BV], tl.float32)
    for h in range(g * share, g * share + share):
        for start in range(first, n, BN):
            i = start + tl.arange(0, BN)
            q = _tile(q_ptr + b * q_b + h * q_h, i, n, q_n, dim, q_d, BD)
            grad = _tile(grad_ptr + b * g_b + h * g_h, i, n, g_n, v_dim, g_d, BV)
            at = (b * heads + h) * n + i
            shift, inverse_total = _statistics(shift_ptr, total_ptr, at, i < n)
            delta = tl.load(delta_ptr + at, mask=i < n, other=0.0)
            logits = _logits(q.to(DOT), k.to(DOT), inverse, scale, i, j, n, m, mask_ptr, mask_m, MASKED, CAUSAL)
            weight = tl.exp2(logits - shift[:, None]) * inverse_total[:, None]  # [BN, BM]
            dv = tl.dot(tl.trans(weight.to(v.dtype).to(DOT)), grad.to(DOT), dv, input_precision="ieee")
            slope = weight * (tl.dot(grad.to(DOT), tl.trans(v.to(DOT)), input_precision="ieee") - delta[:, None])
            dk = tl.dot(tl.trans(slope.to(k.dtype).to(DOT)), q.to(DOT), dk, input_precision="ieee")
    # Through the norm: the part along the key is not felt.
    unit = k.to(tl.float32) * inverse[:, None]
    dk = (dk - unit * tl.sum(dk * unit, axis=1)[:, None]) * (inverse * natural)[:, None]
    _put(dk_ptr + b * dk_b + g * dk_h, dk, j, m, dk_m, dim, BD)
    _put(dv_ptr + b * dv_b + g * dv_h, dv, j, m, dv_m, v_dim, BV)


def _constants(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> dict[str, Any]:
    def block(size: int, most: int) -> int:
        power: int = triton.next_power_of_2(size)
        return min(most, max(16, power))  # 16 is the least that tl.dot takes

    # The interpreter multiplies the bits of bfloat16 numbers as if they were integers.
    interpreted = not isinstance(_forward_kernel, triton.runtime.JITFunction)
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return {
        "MASKED": mask is not None,
        "CAUSAL": is_causal,
        "DOT": tl.float32 if interpreted else types[q.dtype],
        "BN": block(q.shape[2], BLOCK[q.dtype]),
        "BM": block(k.shape[2], BLOCK[q.dtype]),
        "BD": block(q.shape[3], q.shape[3] * 2),
        "BV": block(v.shape[3], v.shape[3] * 2),
        "num_warps": 4,
    }


def _mask_arguments(mask: Tensor | None, like: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The mask as bytes and its strides; without one, any pointer will do."""
    return (like, (0, 0)) if mask is None else (mask.view(torch.uint8), mask.stride())  # type: ignore[return-value]


@torch.library.custom_op("quest_core::short_attention", mutates_args=())
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale · q k̄ᵀ) v, [B, H, N, Dv], and the shift s and the sum Σ 2^(logit/ln 2 − s) of each row.

    The latter two are float32 [B, H, N].

    Args:
        q: [B, H, N, D].
        k: [B, G, M, D] and v: [B, G, M, Dv].
        mask: None or boolean [B, M], True = may be attended to.
    """
    batch, heads, n, dim = q.shape
    out = empty_rows(q, v.shape[3])
    shift, total = (q.new_empty(batch, heads, n, dtype=torch.float32) for _ in range(2))
    constants = _constants(q, k, v, mask, is_causal)
    bits, mask_strides = _mask_arguments(mask, q)
    with torch.cuda.device_of(q):
        _forward_kernel[(batch * heads, triton.cdiv(n, constants["BN"]))](
            q, k, v, bits, out, shift, total,
            heads, heads // k.shape[1], n, k.shape[2], dim, v.shape[3], scale * LOG2E, LIMIT[q.dtype],
            *q.stride(), *k.stride(), *v.stride(), *mask_strides, *out.stride()[:3],
            **constants,
        )  # fmt: skip
    return out, shift, total


@torch.library.custom_op("quest_core::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    shift: Tensor,
    total: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given that of `out` and what the forward pass returned."""
    batch, heads, n, dim = q.shape
    groups, m, v_dim = v.shape[1:]
    dq, dk, dv = empty_rows(q), empty_rows(k), empty_rows(v)
    delta = torch.empty_like(total)
    constants = _constants(q, k, v, mask, is_causal)
    bits, mask_strides = _mask_arguments(mask, q)
    sizes = (heads, heads // groups, n, m, dim, v_dim, scale * LOG2E, scale)
    strides = (*grad.stride(), *q.stride(), *k.stride(), *v.stride(), *mask_strides)
    with torch.cuda.device_of(q):
        _query_kernel[(batch * heads, triton.cdiv(n, constants["BN"]))](
            grad,
            q,
            k,
            v,
            bits,
            out,
            shift,
            total,
            delta,
            dq,
            *sizes,
            *strides,
            *out.stride()[:3],
            *dq.stride()[:3],
            **constants,
        )
        _key_kernel[(batch * groups, triton.cdiv(m, constants["BM"]))](
            grad,
            q,
            k,
            v,
            bits,
            shift,
            total,
            delta,
            dk,
            dv,
            *sizes,
            *strides,
            *dk.stride()[:3],
            *dv.stride()[:3],
            **constants,
        )
    return dq, dk, dv


@short_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    shift, total = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return empty_rows(q, v.shape[3]), shift, total


@short_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    shift: Tensor,
    total: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(q), empty_rows(k), empty_rows(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    out, shift, total = output
    ctx.mark_non_differentiable(shift, total)
    ctx.save_for_backward(q, k, v, mask, out, shift, total)


def _derive(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = short_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return dq, dk, dv, None, None, None


short_attention.register_autograd(_derive, setup_context=_setup)
