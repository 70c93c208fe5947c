"""The Triton kernels of `aft`. Import them only where `mode.triton_takes` holds.

A sum Σ exp(a)·(x₁, x₂) is carried as (top, s₁, s₂), which stands for exp(top)·(s₁, s₂), where top is the maximum of
all a, or a little above it: two such triples add exactly, whatever their sizes. Forwards a is the key and (x₁, x₂) =
(value, 1); backwards a is −(log normaliser) and (x₁, x₂) = (g, g·y).

Tokens come in chunks of `BLOCK`. What a chunk sums to (`_totals_kernel`) is added up over the chunks (`_carry_kernel`),
so that every chunk knows what lies before it, or behind it, and all chunks can go on at once. That is all of
aft-simple; in aft-local it is what a tile receives from keys outside of its window, whose bias is 0.

A tile of [BLOCK queries, BLOCK keys] for `BLOCK` features is one product of exp(w − max w) and exp(k − max k), if both
together spread over less than float32 holds (`_spread`); else its keys are added one by one. Everything is computed in
float32. Samples are the first axis of every grid with samples in it, for the others end at 65535.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
# Inside a Triton kernel nothing has a Python type.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # queries, keys and features of a tile, and tokens of a chunk
SPLITS = 8  # programs that share the gradient of one block of biases
LIMIT = 60.0  # how far exponents may spread in a product: exp(−60) times values and gradients is a normal float32


@triton.jit
def _rows(ptr, row, rows, stride, column, columns, other):
    """Rows `row` and columns `column` of a matrix whose columns have no gaps, [R, C], float32, `other` outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=other).to(tl.float32)


@triton.jit
def _put(ptr, x, row, rows, stride, column, columns):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finite(top):
    """A maximum that may be subtracted: −inf, the maximum of nothing, becomes 0."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def _add(top, s1, s2, other, o1, o2):
    """The sum of two triples."""
    new = tl.maximum(top, other)
    base = _finite(new)
    a, b = tl.exp(top - base), tl.exp(other - base)
    return new, s1 * a + o1 * b, s2 * a + o2 * b


@triton.jit
def _average(top, s1, s2):
    """s₁/s₂ and the log normaliser; 0 and −inf where nothing was visible."""
    some = s2 > 0
    total = tl.where(some, s2, 1.0)
    return tl.where(some, s1 / total, 0.0), tl.where(some, top + tl.log(total), float("-inf"))


@triton.jit
def _gradient_pairs(lse_ptr, grad_ptr, y_ptr, row, rows, stride_g, c, column, columns):
    """a, x₁ and x₂ of the backward pass, [R, C]; lse and y lie without gaps, `c` apart. Queries that saw nothing,
    and rows outside, have a = −inf."""
    lse = _rows(lse_ptr, row, rows, c, column, columns, float("-inf"))
    grad = _rows(grad_ptr, row, rows, stride_g, column, columns, 0.0)
    y = _rows(y_ptr, row, rows, c, column, columns, 0.0)
    seen = lse > float("-inf")
    return tl.where(seen, -lse, float("-inf")), tl.where(seen, grad, 0.0), tl.where(seen, grad * y, 0.0)


# --- sums of chunks ---------------------------------------------------------------------------------------------------


@triton.jit
def _totals_kernel(
    a_ptr, x_ptr, y_ptr, out_ptr,
    tokens, columns, chunks, a_b, a_t, x_b, x_t, part,
    BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The triple of every chunk, written to row `chunk` of out [3, B, chunks, C]; `part` is the size of one third.

    Forwards a and x are keys and values; backwards a is the log normaliser, x the gradient and y the average.
    """
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = chunk * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if BACKWARD:
        a, x1, x2 = _gradient_pairs(
            a_ptr + b * a_b, x_ptr + b * x_b, y_ptr + b * a_b, row, tokens, x_t, a_t, column, columns
        )
    else:
        a = _rows(a_ptr + b * a_b, row, tokens, a_t, column, columns, float("-inf"))
        x1 = _rows(x_ptr + b * x_b, row, tokens, x_t, column, columns, 0.0)
        x2 = tl.full([BLOCK, BLOCK], 1.0, tl.float32)
    top = tl.max(a, axis=0)
    e = tl.exp(a - _finite(top)[None, :])
    at = out_ptr + (b * chunks + chunk) * columns + column
    tl.store(at, top, mask=column < columns)
    tl.store(at + part, tl.sum(e * x1, axis=0), mask=column < columns)
    tl.store(at + 2 * part, tl.sum(e * x2, axis=0), mask=column < columns)


@triton.jit
def _carry_kernel(in_ptr, out_ptr, columns, chunks, in_part, out_part, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of chunks [3, B, chunks, C] -> out [3, B, chunks + 1, C]: row i is the sum of the chunks before i, or
    backwards that of the chunks from i on."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    s1 = tl.zeros([BLOCK], tl.float32)
    s2 = tl.zeros([BLOCK], tl.float32)
    for step in range(0, chunks + 1):
        place = chunks - step if BACKWARD else step
        at = out_ptr + (b * (chunks + 1) + place) * columns + column
        tl.store(at, top, mask=inside)
        tl.store(at + out_part, s1, mask=inside)
        tl.store(at + 2 * out_part, s2, mask=inside)
        if step < chunks:
            at = in_ptr + (b * chunks + (place - 1 if BACKWARD else place)) * columns + column
            top, s1, s2 = _add(
                top, s1, s2,
                tl.load(at, mask=inside, other=float("-inf")),
                tl.load(at + in_part, mask=inside, other=0.0),
                tl.load(at + 2 * in_part, mask=inside, other=0.0),
            )  # fmt: skip


@triton.jit
def _carried(ptr, b, place, places, part, column, columns):
    """The triple at row `place` of [3, B, places, C], [C] each."""
    at = ptr + (b * places + place) * columns + column
    inside = column < columns
    return (
        tl.load(at, mask=inside, other=float("-inf")),
        tl.load(at + part, mask=inside, other=0.0),
        tl.load(at + 2 * part, mask=inside, other=0.0),
    )


# --- aft-simple -------------------------------------------------------------------------------------------------------


@triton.jit
def _running_kernel(
    k_ptr, v_ptr, carry_ptr, y_ptr, lse_ptr,
    tokens, columns, places, k_b, k_t, v_b, v_t, part,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The average up to every token of one chunk, from what the chunks before it sum to."""
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    top, s1, s2 = _carried(carry_ptr, b, chunk, places, part, column, columns)
    for t in range(chunk * BLOCK, tl.minimum(chunk * BLOCK + BLOCK, tokens)):
        row = tl.cast(t, tl.int64)
        k = tl.load(k_ptr + b * k_b + row * k_t + column, mask=inside, other=float("-inf")).to(tl.float32)
        v = tl.load(v_ptr + b * v_b + row * v_t + column, mask=inside, other=0.0).to(tl.float32)
        one = tl.where(k > float("-inf"), 1.0, 0.0)
        top, s1, s2 = _add(top, s1, s2, k, v * one, one)
        y, lse = _average(top, s1, s2)
        at = (b * tokens + row) * columns + column
        tl.store(y_ptr + at, y, mask=inside)
        tl.store(lse_ptr + at, lse, mask=inside)


@triton.jit
def _running_gradient_kernel(
    grad_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, carry_ptr, dk_ptr, dv_ptr,
    tokens, columns, places, g_b, g_t, k_b, k_t, v_b, v_t, part,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk of keys and values, from what the chunks of queries behind it sum to; if not causal
    from the one query that there is, which carry then holds for every chunk."""
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    top, s1, s2 = _carried(carry_ptr, b, chunk + 1 if CAUSAL else 0, places, part, column, columns)
    stop = tl.minimum(chunk * BLOCK + BLOCK, tokens)
    for step in range(chunk * BLOCK, stop):
        row = tl.cast(stop - 1 - (step - chunk * BLOCK), tl.int64)
        at = (b * tokens + row) * columns + column
        if CAUSAL:
            lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
            g = tl.load(grad_ptr + b * g_b + row * g_t + column, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + at, mask=inside, other=0.0)
            seen = lse > float("-inf")
            g = tl.where(seen, g, 0.0)
            top, s1, s2 = _add(top, s1, s2, tl.where(seen, -lse, float("-inf")), g, g * y)
        k = tl.load(k_ptr + b * k_b + row * k_t + column, mask=inside, other=float("-inf")).to(tl.float32)
        v = tl.load(v_ptr + b * v_b + row * v_t + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(k + top)
        tl.store(dk_ptr + at, (weight * (v * s1 - s2)).to(dk_ptr.dtype.element_ty), mask=inside)
        tl.store(dv_ptr + at, (weight * s1).to(dv_ptr.dtype.element_ty), mask=inside)


# --- aft-full and aft-local -------------------------------------------------------------------------------------------


@triton.jit
def _keys_near(first, n, m, offset, window, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    """The keys, from a block's border on and up to another, that the block of queries at `first` meets with a bias."""
    start, stop = 0, m
    behind = tl.minimum(first + BLOCK, n) + offset  # the position after that of the last query
    if LOCAL:
        start = tl.maximum(first + offset - window + 1, 0) // BLOCK * BLOCK
        stop = tl.minimum(stop, behind - 1 + window)
    if CAUSAL:
        stop = tl.minimum(stop, behind)
    return start, tl.maximum(stop, 0)


@triton.jit
def _queries_near(first, n, m, offset, window, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr):
    """The queries, from a block's border on, that meet the block of keys at `first` with a bias."""
    start, stop = 0, n
    if LOCAL:
        start = tl.maximum(first - offset - window + 1, 0) // BLOCK * BLOCK
        stop = tl.minimum(stop, tl.minimum(first + BLOCK, m) - 1 - offset + window)
    if CAUSAL:
        start = tl.maximum(start, tl.maximum(first - offset, 0) // BLOCK * BLOCK)
    return start, tl.maximum(stop, 0)


@triton.jit
def _bias(
    left_ptr, right_ptr, i, j, n, m, rank, left_t, right_t, offset, window,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """w [queries i, keys j], and which of it is visible."""
    ahead = j[None, :] - (i[:, None] + offset)  # t' − t
    if TABLE:
        w = _rows(left_ptr, i, n, left_t, j, m, 0.0)
    else:
        feature = tl.arange(0, RANK)
        left = _rows(left_ptr, i, n, left_t, feature, rank, 0.0)
        right = _rows(right_ptr, j, m, right_t, feature, rank, 0.0)
        w = tl.dot(left, tl.trans(right), input_precision="ieee")
    if LOCAL:
        w = tl.where((ahead < window) & (-ahead < window), w, 0.0)
    seen = (i < n)[:, None] & (j < m)[None, :]
    if CAUSAL:
        seen = seen & (ahead <= 0)
    return w, seen


@triton.jit
def _spread(x, seen, axis: tl.constexpr):
    """The maximum of what is seen along an axis, and the most that anything seen lies below its maximum."""
    top = tl.max(tl.where(seen, x, float("-inf")), axis=axis)
    low = tl.min(tl.where(seen, x, float("inf")), axis=axis)
    return top, tl.max(tl.where(top > float("-inf"), top - low, 0.0), axis=0)


@triton.jit
def _exponentials(w, seen, k, top_w, top_k):
    """exp(w − top) [queries, keys], 0 where hidden, and exp(k − top) [keys, features]."""
    e = tl.where(seen, tl.exp(tl.where(seen, w, 0.0) - _finite(top_w)[:, None]), 0.0)
    return e, tl.exp(k - _finite(top_k)[None, :])


@triton.jit
def _column(w, seen, j, token):
    """The column of a tile that belongs to key `token`: biases and whether they are seen, [queries]."""
    here = (j == token)[None, :]
    return tl.sum(tl.where(here, w, 0.0), axis=1), tl.max(tl.where(here & seen, 1, 0), axis=1) > 0


@triton.jit
def _key(k_ptr, v_ptr, token, k_t, v_t, column, columns):
    """Key and value of one token, [features]."""
    inside = column < columns
    row = tl.cast(token, tl.int64)
    k = tl.load(k_ptr + row * k_t + column, mask=inside, other=float("-inf")).to(tl.float32)
    return k, tl.load(v_ptr + row * v_t + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _biased_kernel(
    k_ptr, v_ptr, left_ptr, right_ptr, before_ptr, after_ptr, y_ptr, lse_ptr,
    n, m, columns, rank, offset, window, limit,
    k_b, k_t, v_b, v_t, left_t, right_t, places, part,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The averages of one block of queries and features."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_ptr += b * k_b
    v_ptr += b * v_b
    start, stop = _keys_near(tl.program_id(1) * BLOCK, n, m, offset, window, CAUSAL, LOCAL, BLOCK)
    top = tl.full([BLOCK, BLOCK], float("-inf"), tl.float32)
    s1 = tl.zeros([BLOCK, BLOCK], tl.float32)
    s2 = tl.zeros([BLOCK, BLOCK], tl.float32)
    if LOCAL:
        far, f1, f2 = _carried(before_ptr, b, start // BLOCK, places, part, column, columns)
        top, s1, s2 = _add(top, s1, s2, far[None, :], f1[None, :], f2[None, :])
        if not CAUSAL:
            far, f1, f2 = _carried(after_ptr, b, (stop + BLOCK - 1) // BLOCK, places, part, column, columns)
            top, s1, s2 = _add(top, s1, s2, far[None, :], f1[None, :], f2[None, :])
    for first in range(start, stop, BLOCK):
        j = first + tl.arange(0, BLOCK)
        w, seen = _bias(
            left_ptr, right_ptr, i, j, n, m, rank, left_t, right_t, offset, window, TABLE, CAUSAL, LOCAL, RANK
        )
        k = _rows(k_ptr, j, m, k_t, column, columns, float("-inf"))
        top_w, reach = _spread(w, seen, 1)
        top_k, spread = _spread(k, k > float("-inf"), 0)
        if spread + reach <= limit:
            v = _rows(v_ptr, j, m, v_t, column, columns, 0.0)
            e, x = _exponentials(w, seen, k, top_w, top_k)
            o2 = tl.dot(e, x, input_precision="ieee")
            o1 = tl.dot(e, x * v, input_precision="ieee")
            # Query and feature may see nothing in common, and then the tile's maxima mean nothing to them.
            other = tl.where(o2 > 0, top_w[:, None] + top_k[None, :], float("-inf"))
            top, s1, s2 = _add(top, s1, s2, other, o1, o2)
        else:
            for token in range(first, tl.minimum(first + BLOCK, m)):
                w_at, seen_at = _column(w, seen, j, token)
                k_at, v_at = _key(k_ptr, v_ptr, token, k_t, v_t, column, columns)
                other = tl.where(seen_at[:, None], w_at[:, None] + k_at[None, :], float("-inf"))
                one = tl.where(other > float("-inf"), 1.0, 0.0)
                top, s1, s2 = _add(top, s1, s2, other, v_at[None, :] * one, one)
    y, lse = _average(top, s1, s2)
    _put(y_ptr + b * n * columns, y, i, n, columns, column, columns)
    _put(lse_ptr + b * n * columns, lse, i, n, columns, column, columns)


@triton.jit
def _scaled(top_w, top_k, a, grad, limit):
    """exp(top of a tile − lse)·g, [queries, features]. The exponent is more than `limit` only where the tile shows
    nothing to query and feature, and there the other factors are 0."""
    exponent = _finite(top_w)[:, None] + _finite(top_k)[None, :] + a
    return tl.exp(tl.minimum(exponent, limit + 4.0)) * grad


@triton.jit
def _biased_key_kernel(
    grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, before_ptr, after_ptr, dk_ptr, dv_ptr,
    n, m, columns, rank, offset, window, limit,
    g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t, places, part,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values and features, over all queries."""
    b = tl.program_id(0).to(tl.int64)
    first_key = tl.program_id(1) * BLOCK
    j = first_key + tl.arange(0, BLOCK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_ptr += b * k_b
    v_ptr += b * v_b
    k = _rows(k_ptr, j, m, k_t, column, columns, float("-inf"))
    v = _rows(v_ptr, j, m, v_t, column, columns, 0.0)
    top_k, spread = _spread(k, k > float("-inf"), 0)
    dk = tl.zeros([BLOCK, BLOCK], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK], tl.float32)
    start, stop = _queries_near(first_key, n, m, offset, window, CAUSAL, LOCAL, BLOCK)
    if LOCAL:
        far, f1, f2 = _carried(after_ptr, b, (stop + BLOCK - 1) // BLOCK, places, part, column, columns)
        weight = tl.exp(k + far[None, :])
        dk += weight * (v * f1[None, :] - f2[None, :])
        dv += weight * f1[None, :]
        if not CAUSAL:
            far, f1, f2 = _carried(before_ptr, b, start // BLOCK, places, part, column, columns)
            weight = tl.exp(k + far[None, :])
            dk += weight * (v * f1[None, :] - f2[None, :])
            dv += weight * f1[None, :]
    for first in range(start, stop, BLOCK):
        i = first + tl.arange(0, BLOCK)
        w, seen = _bias(
            left_ptr, right_ptr, i, j, n, m, rank, left_t, right_t, offset, window, TABLE, CAUSAL, LOCAL, RANK
        )
        at = b * n * columns
        a, g1, g2 = _gradient_pairs(lse_ptr + at, grad_ptr + b * g_b, y_ptr + at, i, n, g_t, columns, column, columns)
        top_w, reach = _spread(w, seen, 1)
        if spread + reach <= limit:
            e, x = _exponentials(w, seen, k, top_w, top_k)
            back1 = tl.dot(tl.trans(e), _scaled(top_w, top_k, a, g1, limit), input_precision="ieee")
            back2 = tl.dot(tl.trans(e), _scaled(top_w, top_k, a, g2, limit), input_precision="ieee")
            dk += x * (v * back1 - back2)
            dv += x * back1
        else:
            for token in range(first_key, tl.minimum(first_key + BLOCK, m)):
                w_at, seen_at = _column(w, seen, j, token)
                k_at, v_at = _key(k_ptr, v_ptr, token, k_t, v_t, column, columns)
                p = tl.exp(tl.where(seen_at[:, None], w_at[:, None] + k_at[None, :] + a, float("-inf")))
                here = (j == token)[:, None]
                dk += tl.where(here, tl.sum(p * (g1 * v_at[None, :] - g2), axis=0)[None, :], 0.0)
                dv += tl.where(here, tl.sum(p * g1, axis=0)[None, :], 0.0)
    at = b * m * columns
    _put(dk_ptr + at, dk, j, m, columns, column, columns)
    _put(dv_ptr + at, dv, j, m, columns, column, columns)


@triton.jit
def _bias_gradient(
    grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, i, j, first_key,
    batch, n, m, columns, rank, offset, window, limit, g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of w, [queries, keys], over all samples and features."""
    w, seen = _bias(left_ptr, right_ptr, i, j, n, m, rank, left_t, right_t, offset, window, TABLE, CAUSAL, LOCAL, RANK)
    top_w, reach = _spread(w, seen, 1)
    dw = tl.zeros([BLOCK, BLOCK], tl.float32)
    for sample in range(0, batch):
        b = tl.cast(sample, tl.int64)
        for first_column in range(0, columns, BLOCK):
            column = first_column + tl.arange(0, BLOCK)
            k = _rows(k_ptr + b * k_b, j, m, k_t, column, columns, float("-inf"))
            top_k, spread = _spread(k, k > float("-inf"), 0)
            at = b * n * columns
            a, g1, g2 = _gradient_pairs(
                lse_ptr + at, grad_ptr + b * g_b, y_ptr + at, i, n, g_t, columns, column, columns
            )
            if spread + reach <= limit:
                v = _rows(v_ptr + b * v_b, j, m, v_t, column, columns, 0.0)
                e, x = _exponentials(w, seen, k, top_w, top_k)
                back = tl.dot(_scaled(top_w, top_k, a, g1, limit), tl.trans(x * v), input_precision="ieee")
                back -= tl.dot(_scaled(top_w, top_k, a, g2, limit), tl.trans(x), input_precision="ieee")
                dw += e * back
            else:
                for token in range(first_key, tl.minimum(first_key + BLOCK, m)):
                    w_at, seen_at = _column(w, seen, j, token)
                    k_at, v_at = _key(k_ptr + b * k_b, v_ptr + b * v_b, token, k_t, v_t, column, columns)
                    p = tl.exp(tl.where(seen_at[:, None], w_at[:, None] + k_at[None, :] + a, float("-inf")))
                    slope = tl.sum(p * (g1 * v_at[None, :] - g2), axis=1)  # [queries]
                    dw += tl.where((j == token)[None, :], slope[:, None], 0.0)
    if LOCAL:
        ahead = j[None, :] - (i[:, None] + offset)
        dw = tl.where((ahead < window) & (-ahead < window), dw, 0.0)
    return dw


@triton.jit
def _biased_left_kernel(
    grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, out_ptr,
    batch, n, m, columns, rank, offset, window, limit,
    g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t, out_s, out_t,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradient of `left` for one block of queries; every SPLITS-th block of keys, so that more programs share it.

    Without `right` it is the gradient of the table, [N, M]; with it, a share of it, out [SPLITS, N, r].
    """
    first = tl.program_id(0) * BLOCK
    i = first + tl.arange(0, BLOCK)
    start, stop = _keys_near(first, n, m, offset, window, CAUSAL, LOCAL, BLOCK)
    feature = tl.arange(0, RANK)
    d_left = tl.zeros([BLOCK, RANK], tl.float32)
    for first_key in range(start + tl.program_id(1) * BLOCK, stop, BLOCK * SPLITS):
        j = first_key + tl.arange(0, BLOCK)
        dw = _bias_gradient(
            grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, i, j, first_key,
            batch, n, m, columns, rank, offset, window, limit, g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t,
            TABLE, CAUSAL, LOCAL, RANK, BLOCK,
        )  # fmt: skip
        if TABLE:
            _put(out_ptr, dw, i, n, out_t, j, m)
        else:
            right = _rows(right_ptr, j, m, right_t, feature, rank, 0.0)
            d_left = tl.dot(dw, right, d_left, input_precision="ieee")
    if not TABLE:
        _put(out_ptr + tl.program_id(1).to(tl.int64) * out_s, d_left, i, n, out_t, feature, rank)


@triton.jit
def _biased_right_kernel(
    grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, out_ptr,
    batch, n, m, columns, rank, offset, window, limit,
    g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t, out_s, out_t,
    TABLE: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradient of `right` for one block of keys, a share of it from every SPLITS-th block of queries."""
    first_key = tl.program_id(0) * BLOCK
    j = first_key + tl.arange(0, BLOCK)
    start, stop = _queries_near(first_key, n, m, offset, window, CAUSAL, LOCAL, BLOCK)
    feature = tl.arange(0, RANK)
    d_right = tl.zeros([BLOCK, RANK], tl.float32)
    for first in range(start + tl.program_id(1) * BLOCK, stop, BLOCK * SPLITS):
        i = first + tl.arange(0, BLOCK)
        dw = _bias_gradient(
            grad_ptr, k_ptr, v_ptr, left_ptr, right_ptr, y_ptr, lse_ptr, i, j, first_key,
            batch, n, m, columns, rank, offset, window, limit, g_b, g_t, k_b, k_t, v_b, v_t, left_t, right_t,
            TABLE, CAUSAL, LOCAL, RANK, BLOCK,
        )  # fmt: skip
        left = _rows(left_ptr, i, n, left_t, feature, rank, 0.0)
        d_right = tl.dot(tl.trans(dw), left, d_right, input_precision="ieee")
    _put(out_ptr + tl.program_id(1).to(tl.int64) * out_s, d_right, j, m, out_t, feature, rank)


# --- launching --------------------------------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    """`x` with features that have no gaps, as they have unless somebody transposed them."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _blocks(size: int) -> int:
    count: int = triton.cdiv(size, BLOCK)
    return count


def _carry(a: Tensor, x: Tensor, y: Tensor | None, *, backward: bool, reverse: bool) -> Tensor:
    """What lies before each chunk of tokens, or (`reverse`) from it on: [3, B, chunks + 1, C].

    Args:
        a: [B, T, C], the keys; backwards the log normalisers, without gaps.
        x: [B, T, C], the values; backwards the gradients.
        y: the averages, backwards.
    """
    batch, tokens, columns = a.shape
    chunks = _blocks(tokens)
    sums = a.new_empty(3, batch, chunks, columns, dtype=torch.float32)
    out = a.new_empty(3, batch, chunks + 1, columns, dtype=torch.float32)
    with torch.cuda.device_of(a):
        _totals_kernel[(batch, chunks, _blocks(columns))](
            a, x, a if y is None else y, sums,
            tokens, columns, chunks, *a.stride()[:2], *x.stride()[:2], sums.stride(0),
            BACKWARD=backward, BLOCK=BLOCK,
        )  # fmt: skip
        _carry_kernel[(batch, _blocks(columns))](
            sums, out, columns, chunks, sums.stride(0), out.stride(0), BACKWARD=reverse, BLOCK=BLOCK
        )
    return out


@torch.library.custom_op("quest_core::aft_simple", mutates_args=())
def aft_simple(k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The average of v weighted by exp(k), and its log normaliser, float32 [B, M, C] each, [B, 1, C] if not causal.

    Args:
        k: [B, M, C]; a key of −inf is invisible.
        v: [B, M, C].
        is_causal: one average for each token, of the tokens up to it.
    """
    k, v = _dense(k), _dense(v)
    batch, tokens, columns = k.shape
    carry = _carry(k, v, None, backward=False, reverse=False)
    if not is_causal:
        top, s1, s2 = (x[:, -1:] for x in carry)
        seen = s2 > 0
        total = torch.where(seen, s2, 1)
        return torch.where(seen, s1 / total, 0), torch.where(seen, top + total.log(), -torch.inf)
    y, lse = (k.new_empty(k.shape, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(k):
        _running_kernel[(batch, _blocks(tokens), _blocks(columns))](
            k, v, carry, y, lse,
            tokens, columns, carry.shape[2], *k.stride()[:2], *v.stride()[:2], carry.stride(0),
            BLOCK=BLOCK,
        )  # fmt: skip
    return y, lse


@torch.library.custom_op("quest_core::aft_simple_backward", mutates_args=())
def aft_simple_backward(
    grad: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, given that of the average and what the forward pass returned."""
    grad, k, v = _dense(grad), _dense(k), _dense(v)
    batch, tokens, columns = k.shape
    if is_causal:
        carry = _carry(lse, grad, y, backward=True, reverse=True)
    else:
        seen = lse > -torch.inf
        carry = torch.stack([torch.where(seen, -lse, -torch.inf), *(torch.where(seen, x, 0) for x in (grad, grad * y))])
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    with torch.cuda.device_of(k):
        _running_gradient_kernel[(batch, _blocks(tokens), _blocks(columns))](
            grad, k, v, y, lse, carry, dk, dv,
            tokens, columns, carry.shape[2], *grad.stride()[:2], *k.stride()[:2], *v.stride()[:2], carry.stride(0),
            CAUSAL=is_causal, BLOCK=BLOCK,
        )  # fmt: skip
    return dk, dv


def _flags(left: Tensor, right: Tensor | None, is_causal: bool, window: int) -> dict[str, Any]:
    rank: int = 16 if right is None else max(16, triton.next_power_of_2(left.shape[1]))
    return {"TABLE": right is None, "CAUSAL": is_causal, "LOCAL": window > 0, "RANK": rank, "BLOCK": BLOCK}


def _sizes(k: Tensor, left: Tensor, is_causal: bool, window: int) -> tuple[Any, ...]:
    n, (_, m, columns) = left.shape[0], k.shape
    return n, m, columns, left.shape[1], m - n if is_causal else 0, window, LIMIT


@torch.library.custom_op("quest_core::aft_biased", mutates_args=())
def aft_biased(
    k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """The average of v weighted by exp(k_t' + w_tt') and its log normaliser, float32 [B, N, C] each; see `aft`."""
    k, v, left = _dense(k), _dense(v), _dense(left)
    right = None if right is None else _dense(right)
    batch, _, columns = k.shape
    n = left.shape[0]
    y, lse = (k.new_empty(batch, n, columns, dtype=torch.float32) for _ in range(2))
    before = after = y
    if window:
        before = _carry(k, v, None, backward=False, reverse=False)
        after = before if is_causal else _carry(k, v, None, backward=False, reverse=True)
    with torch.cuda.device_of(k):
        _biased_kernel[(batch, _blocks(n), _blocks(columns))](
            k, v, left, left if right is None else right, before, after, y, lse,
            *_sizes(k, left, is_causal, window),
            *k.stride()[:2], *v.stride()[:2], left.stride(0), 0 if right is None else right.stride(0),
            _blocks(k.shape[1]) + 1, before.stride(0),
            **_flags(left, right, is_causal, window),
        )  # fmt: skip
    return y, lse


@torch.library.custom_op("quest_core::aft_biased_backward", mutates_args=())
def aft_biased_backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    y: Tensor,
    lse: Tensor,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of k, v, left and right (empty where there is none).

    With p_tt' = exp(k_t' + w_tt' − lse_t): dv_t' = Σ_t p g_t, dk_t' = Σ_t p g_t (v_t' − y_t) and
    dw_tt' = Σ over features and samples of p g_t (v_t' − y_t).
    """
    grad, k, v, left = _dense(grad), _dense(k), _dense(v), _dense(left)
    right = None if right is None else _dense(right)
    batch, m, columns = k.shape
    n = left.shape[0]
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    before = after = lse
    if window:
        after = _carry(lse, grad, y, backward=True, reverse=True)
        before = after if is_causal else _carry(lse, grad, y, backward=True, reverse=False)
    sizes, flags = _sizes(k, left, is_causal, window), _flags(left, right, is_causal, window)
    other, other_stride = (left, 0) if right is None else (right, right.stride(0))
    strides = (*grad.stride()[:2], *k.stride()[:2], *v.stride()[:2], left.stride(0), other_stride)
    with torch.cuda.device_of(k):
        _biased_key_kernel[(batch, _blocks(m), _blocks(columns))](
            grad, k, v, left, other, y, lse, before, after, dk, dv, *sizes, *strides,
            _blocks(n) + 1, before.stride(0), **flags,
        )  # fmt: skip
        inputs = (grad, k, v, left, other, y, lse)
        if right is None:
            d_left, d_right = torch.zeros_like(left), left.new_empty(0)
            _biased_left_kernel[(_blocks(n), SPLITS)](
                *inputs, d_left, batch, *sizes, *strides, 0, d_left.stride(0), SPLITS=SPLITS, **flags
            )
            return dk, dv, d_left, d_right
        gradients = []
        for kernel, x in ((_biased_left_kernel, left), (_biased_right_kernel, right)):
            shares = x.new_empty(SPLITS, *x.shape, dtype=torch.float32)
            kernel[(_blocks(x.shape[0]), SPLITS)](
                *inputs, shares, batch, *sizes, *strides, *shares.stride()[:2], SPLITS=SPLITS, **flags
            )
            gradients.append(shares.sum(0).to(x.dtype))
    return dk, dv, gradients[0], gradients[1]


@aft_simple.register_fake
def _(k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    shape = (k.shape[0], k.shape[1] if is_causal else 1, k.shape[2])
    return k.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=torch.float32)


@aft_simple_backward.register_fake
def _(grad: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


@aft_biased.register_fake
def _(k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, is_causal: bool, window: int) -> tuple[Tensor, Tensor]:
    shape = (k.shape[0], left.shape[0], k.shape[2])
    return k.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=torch.float32)


@aft_biased_backward.register_fake
def _(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    y: Tensor,
    lse: Tensor,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_right = left.new_empty(0) if right is None else right.new_empty(right.shape)
    return k.new_empty(k.shape), v.new_empty(v.shape), left.new_empty(left.shape), d_right


def _simple_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, v, ctx.is_causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(k, v, *output)


def _simple_derive(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*aft_simple_backward(grad, *ctx.saved_tensors, ctx.is_causal), None)


def _biased_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _biased_derive(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dk, dv, d_left, d_right = aft_biased_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.window)
    return dk, dv, d_left, d_right if ctx.saved_tensors[3] is not None else None, None, None


aft_simple.register_autograd(_simple_derive, setup_context=_simple_setup)
aft_biased.register_autograd(_biased_derive, setup_context=_biased_setup)
