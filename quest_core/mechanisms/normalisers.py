"""Normalisers: logits to weights. [R] is Your Attention Matters, [S] Sinkformers (Sander et al., 2022).

Softmax has fused kernels. Sigmoid and sinkhorn have none: from `PLAIN_WEIGHTS` elements on, their weights are computed
in blocks of queries, forward and backward, so that no [B, H, N, M] tensor exists at any time. Both ways are one
formula: a block is the plain formula on some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels.pytorch import (
    HAS_GROUPED_ATTENTION,
    HAS_OPERATORS,
    HIDES_BLIND_ROWS,
    autocast_dtype,
    is_compiling,
    is_exporting,
    no_autocast,
    operator,
    transform,
    wider,
)
from . import reference
from .base import Dims, Normaliser, apply_weights, drop, logits, merge_causal
from .part import Option, Part

PLAIN_WEIGHTS = 2**23
"""With this many weights a call or more, B·H·N·M, they are computed in blocks: 32 MiB of float32."""

BLOCK_WEIGHTS = 2**20
"""Weights a block, unless that would be fewer than `BLOCK_ROWS` queries."""

BLOCK_ROWS = 64
"""Least number of queries a block, below which matrix products are thin."""


class Softmax(Normaliser):
    """exp(l) / Σ exp(l) over the visible keys, by scaled_dot_product_attention."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        grouped: bool,
    ) -> Tensor:
        """See `Normaliser.forward`."""
        if is_causal:
            n, m = q.shape[2], k.shape[2]
            if n == 1:
                is_causal = False  # the last query sees every key
            elif mask is not None or n != m:  # PyTorch aligns causal masks at the first key
                mask, is_causal = merge_causal(mask, n, m, q.device), False
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if scale <= 0:
            q, scale = q * scale, 1.0  # the kernels look for the largest product before they scale it
        if transform() is not None:  # the kernels have neither rules for batches nor forward derivatives
            return super().forward(
                q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p, grouped=grouped
            )
        blind = None
        if mask is not None and (is_exporting() or not HIDES_BLIND_ROWS):  # other runtimes divide 0 by 0 there
            blind = _hidden(mask).all(-1, keepdim=True)  # [B or 1, H or 1, N or 1, 1]
            mask = mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0)
        if not HAS_GROUPED_ATTENTION:  # autocast does not know the function before PyTorch 2.5
            q, k, v = _autocast(q, k, v)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        if not grouped:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)
        elif HAS_GROUPED_ATTENTION:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
        else:
            share = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)
        return out if blind is None else out.masked_fill(blind, 0)

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """See `Normaliser.weights`."""
        if mask is None:
            return logits.softmax(-1)
        hidden = _hidden(mask)
        blind = hidden.all(-1, keepdim=True)  # [B or 1, H or 1, N or 1, 1]: rows with no visible key
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(hidden & ~blind, -math.inf)
        else:
            logits = logits + mask.masked_fill(blind, 0)
        return logits.softmax(-1).masked_fill(blind, 0)


class Sigmoid(Normaliser):
    """σ(l + b): every weight on its own, so that a row need not sum to 1 ([R], eq. 5; Ramapuram et al., 2024).

    Args:
        bias: the constant b; None means −log of the number of keys that the row sees, which lets weights start out
            summing to about 1.
    """

    def __init__(self, dims: Dims | None, *, bias: float | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        grouped: bool,
    ) -> Tensor:
        """See `Normaliser.forward`."""
        if not _in_blocks(q, k, mask):
            return super().forward(
                q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p, grouped=grouped
            )
        q, k, v = _autocast(q, k, v)
        out: Tensor = _sigmoid_blocks(q, k, v, mask, scale, self.bias, is_causal, dropout_p, _seed(dropout_p))
        return out

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """See `Normaliser.weights`."""
        return _sigmoid(logits, mask, self.bias)


class Sinkhorn(Normaliser):
    """Weights whose rows sum to 1 and whose columns share their mass evenly ([R], eq. 7–10; [S]).

    From exp(l/ε), half-steps alternate, rows first: scale every row to sum 1, then every column to sum N/M. Rows that
    see no key and columns that no row sees are padding: they take no mass, and N and M count only the others. An odd
    number of half-steps ends on rows; one is softmax(l/ε). Additive masks are added to l, before the division by ε.

    A mask of keys, [B, 1, 1, M], leaves every query a row that takes its share of each column. Where padding tokens are
    queries too, as in self-attention, their rows must be hidden as well, because the result of the other rows depends
    on it: `Mechanism.padding_mask` does that.

    Args:
        iterations: half-steps.
        eps: ε, the temperature.
    """

    def __init__(self, dims: Dims | None, *, iterations: int, eps: float) -> None:
        super().__init__()
        self.iterations = iterations
        self.eps = eps
        self.softmax = Softmax(dims)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        grouped: bool,
    ) -> Tensor:
        """See `Normaliser.forward`."""
        scale = scale / self.eps
        mask = mask if mask is None or mask.dtype == torch.bool else mask / self.eps
        if self.iterations == 1:
            return self.softmax.forward(
                q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p, grouped=grouped
            )
        if not _in_blocks(q, k, mask):
            weights = _sinkhorn(logits(q, k, scale, grouped), mask, self.iterations)
            return apply_weights(drop(weights, dropout_p), v, grouped)
        q, k, v = _autocast(q, k, v)
        out: Tensor = _sinkhorn_blocks(q, k, v, mask, scale, self.iterations, dropout_p, _seed(dropout_p))[0]
        return out

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """See `Normaliser.weights`."""
        mask = mask if mask is None or mask.dtype == torch.bool else mask / self.eps
        return _sinkhorn(logits / self.eps, mask, self.iterations)


# The formulas, on all rows or on a block of them.


def _hidden(mask: Tensor) -> Tensor:
    """True where the mask hides."""
    return ~mask if mask.dtype == torch.bool else mask == -math.inf


def _seen(mask: Tensor | None, like: Tensor) -> Tensor:
    """The mask as booleans, broadcastable to the logits `like` and as wide: [..., N or 1, M]."""
    if mask is None:
        return torch.ones(like.shape[-1], dtype=torch.bool, device=like.device)[None]
    return (~_hidden(mask)).expand(*mask.shape[:-1], like.shape[-1])


def _sigmoid(logits: Tensor, mask: Tensor | None, bias: float | None) -> Tensor:
    """Logits [B, H, N, M] -> weights [B, H, N, M]."""
    seen = _seen(mask, logits)
    shifted = logits.to(wider(logits.dtype))
    if mask is not None and mask.dtype != torch.bool:
        shifted = shifted + mask
    if bias is not None:
        shifted = shifted + bias
    else:
        shifted = shifted - seen.sum(-1, keepdim=True).clamp(min=1).to(shifted.dtype).log()
    weights = shifted.sigmoid()
    if mask is not None:
        weights = weights.masked_fill(~seen, 0)
    return weights.to(logits.dtype)


def _sinkhorn(logits: Tensor, mask: Tensor | None, iterations: int) -> Tensor:
    """Logits over ε [B, H, N, M] -> weights [B, H, N, M] by `iterations` half-steps."""
    z = _masked(logits, mask)
    target = _log_column_sum(mask, z)
    f: Tensor | float = 0.0  # log factors of rows [B, H, N, 1]
    g: Tensor | float = 0.0  # log factors of columns [B, H, 1, M]
    for step in range(iterations):
        if step % 2 == 0:
            f = -_log_sum_exp(z + g, -1, mask is not None)
        else:
            g = target - _log_sum_exp(z + f, -2, mask is not None)
    return (z + f + g).exp().to(logits.dtype)


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits in float32 or wider, −inf where the mask hides."""
    z = logits.to(wider(logits.dtype))
    if mask is None:
        return z
    return z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)


def _log_column_sum(mask: Tensor | None, like: Tensor) -> Tensor:
    """log(N/M), where N counts the rows that see a key and M the columns that a row sees: [B or 1, H or 1, 1, 1].

    Args:
        like: the logits [B, H, N, M]. The sizes are counted and not read, so that no graph fixes them.
    """
    seen = _seen(mask, like)
    seen = seen.expand(*seen.shape[:-2], *like.shape[-2:])  # [..., N, M]
    rows, columns = [  # no generator: Dynamo of PyTorch 2.1 does not unpack one
        seen.any(axis, keepdim=True).sum((-2, -1), keepdim=True).clamp(min=1).to(like.dtype).log() for axis in (-1, -2)
    ]
    return rows - columns


def _log_sum_exp(x: Tensor, dim: int, masked: bool) -> Tensor:
    """log Σ exp(x) over `dim`, kept; 0 with zero gradients where all are −inf, where logsumexp's gradient is NaN."""
    if not masked:
        return x.logsumexp(dim, keepdim=True)
    blind = (x == -math.inf).all(dim, keepdim=True)
    return x.masked_fill(blind, 0).logsumexp(dim, keepdim=True).masked_fill(blind, 0)


# Blocks of queries. Custom operators, so that torch.compile and torch.export see one node and not a loop.


def _in_blocks(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether the weights are too large to keep, and can be done without."""
    if not HAS_OPERATORS or is_exporting() or transform() is not None:
        return False
    if mask is not None and mask.requires_grad:
        return False  # a learned bias is an N×M tensor itself, and so is its gradient
    # A compiled graph takes blocks always: asking for sizes would give it one graph below and one above the limit.
    return is_compiling() or q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= PLAIN_WEIGHTS


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast would for a matrix product, which it cannot see inside a custom operator."""
    lower = autocast_dtype(tensors[0].device.type)
    return [x if lower is None or x.dtype == torch.float64 else x.to(lower) for x in tensors]


def _seed(dropout_p: float) -> Tensor | None:
    """What lets the backward pass draw the forward pass's dropout again."""
    return torch.randint(2**62, (), device="cpu") if dropout_p > 0 else None


class _Dropout:
    """Dropout masks that a second walk over the same blocks draws again."""

    def __init__(self, p: float, seed: Tensor | None, device: torch.device) -> None:
        self.p = p
        self.generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, of one shape, times one draw of factors: 0 or 1 / (1 − p)."""
        if self.generator is None:
            return tensors
        kept = torch.rand(tensors[0].shape, generator=self.generator, device=tensors[0].device) >= self.p
        return tuple(x * kept / (1 - self.p) for x in tensors)


def _blocks(q: Tensor, k: Tensor, is_causal: bool = False) -> Iterator[tuple[int, int, int]]:
    """(first query, query after the last, number of keys that these can see), skipping queries that see none.

    Under a causal mask the last query of a block sees all its keys.
    """
    batch, heads, n = q.shape[:3]
    m = k.shape[2]
    rows = max(BLOCK_ROWS, BLOCK_WEIGHTS // max(batch * heads * m, 1))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        keys = min(stop + m - n, m) if is_causal else m
        if keys > 0:
            yield start, stop, keys


def _part(mask: Tensor | None, start: int, stop: int, keys: int) -> Tensor | None:
    """The block of a broadcastable mask."""
    if mask is None:
        return None
    mask = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
    return mask if mask.shape[-1] == 1 else mask[..., :keys]


def _sigmoid_part(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: float | None,
    is_causal: bool,
    start: int,
    stop: int,
    keys: int,
) -> Tensor:
    """The weights [B, H, rows, keys] of a block, which under a causal mask is a causal problem in itself."""
    mask = _part(mask, start, stop, keys)
    mask = merge_causal(mask, stop - start, keys, q.device) if is_causal else mask
    return _sigmoid(logits(q[:, :, start:stop], k[:, :, :keys], scale, q.shape[1] != k.shape[1]), mask, bias)


def _back(weights: Tensor, x: Tensor, groups: int) -> Tensor:
    """weightsᵀ x, summed over the query heads of a group: [B, H, N, M], [B, H, N, D] -> [B, G, M, D]."""
    batch, heads, n, m = weights.shape
    rows = heads // groups * n
    return weights.reshape(batch, groups, rows, m).transpose(-1, -2) @ x.reshape(batch, groups, rows, x.shape[-1])


class _Gradients:
    """Sums of gradients over blocks, in float32 or wider."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.wide = wider(q.dtype)
        self.q, self.k, self.v = (torch.zeros_like(x, dtype=self.wide) for x in (q, k, v))
        self.inputs, self.scale, self.grouped = (q, k, v), scale, q.shape[1] != k.shape[1]

    def add_logits(self, grad: Tensor, start: int, stop: int, keys: int) -> None:
        """`grad` [B, H, rows, keys], of the logits of a block."""
        q, k, _ = self.inputs
        grad = grad.to(q.dtype)
        self.q[:, :, start:stop] += apply_weights(grad, k[:, :, :keys], self.grouped) * self.scale
        self.k[:, :, :keys] += _back(grad, q[:, :, start:stop], k.shape[1]) * self.scale

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (total.to(x.dtype) for total, x in zip((self.q, self.k, self.v), self.inputs, strict=True))
        return q, k, v


def _second(name: str, ctx: Any, *_: Any) -> Any:
    raise UnsupportedError(
        f"attention '{name}' does not support double backward (create_graph=True) from {PLAIN_WEIGHTS} weights "
        "a call on, or under torch.compile: its gradient is one operator; use fewer tokens or heads a call, or softmax"
    )


def _nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """A gradient that refuses to be differentiated keeps nothing."""


@operator(
    "quest::sigmoid_attention",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float? bias, bool is_causal, float dropout_p, "
    "Tensor? seed) -> Tensor",
)
def _sigmoid_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: float | None,
    is_causal: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    grouped = q.shape[1] != k.shape[1]
    dropout = _Dropout(dropout_p, seed, q.device)
    with no_autocast(q.device.type):
        for start, stop, keys in _blocks(q, k, is_causal):
            weights = _sigmoid_part(q, k, mask, scale, bias, is_causal, start, stop, keys)
            out[:, :, start:stop] = apply_weights(dropout(weights)[0], v[:, :, :keys], grouped)
    return out


@operator(
    "quest::sigmoid_attention_backward",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float? bias, bool is_causal, "
    "float dropout_p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
)
def _sigmoid_blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: float | None,
    is_causal: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    total = _Gradients(q, k, v, scale)
    grouped = total.grouped
    dropout = _Dropout(dropout_p, seed, q.device)
    with no_autocast(q.device.type):
        for start, stop, keys in _blocks(q, k, is_causal):
            weights = _sigmoid_part(q, k, mask, scale, bias, is_causal, start, stop, keys)
            change = logits(grad[:, :, start:stop], v[:, :, :keys], 1.0, grouped)  # of the weights after dropout
            dropped, change = dropout(weights, change)
            total.v[:, :, :keys] += _back(dropped, grad[:, :, start:stop], k.shape[1])
            wide = weights.to(total.wide)
            total.add_logits(change * wide * (1 - wide), start, stop, keys)
    return total.result()


def _fake_sigmoid(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


_sigmoid_blocks.register_fake(_fake_sigmoid)


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_sigmoid_blocks_backward.register_fake(_fake_gradients)
_sigmoid_blocks_backward.register_autograd(partial(_second, "sigmoid"), setup_context=_nothing)


def _sigmoid_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.scale, ctx.bias, ctx.is_causal, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(q, k, v, mask, seed)


def _sigmoid_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, seed = ctx.saved_tensors
    change = _sigmoid_blocks_backward(grad, q, k, v, mask, ctx.scale, ctx.bias, ctx.is_causal, ctx.dropout_p, seed)
    return (*change, *[None] * 6)


_sigmoid_blocks.register_autograd(_sigmoid_grad, setup_context=_sigmoid_setup)


@operator(
    "quest::sinkhorn_attention",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, int iterations, float dropout_p, Tensor? seed) "
    "-> (Tensor, Tensor, Tensor)",
)
def _sinkhorn_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    iterations: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B, H, N, Dv] and the log factors of rows and columns: [steps, B, H, N, 1], [steps, B, H, 1, M]."""
    batch, heads, n = q.shape[:3]
    m = k.shape[2]
    wide = wider(q.dtype)
    out = q.new_empty(batch, heads, n, v.shape[-1])
    f = q.new_empty(iterations // 2, batch, heads, n, 1, dtype=wide)
    g = q.new_empty(iterations // 2, batch, heads, 1, m, dtype=wide)
    grouped = heads != k.shape[1]
    dropout = _Dropout(dropout_p, seed, q.device)
    with no_autocast(q.device.type):
        target = _log_column_sum(mask, f.new_zeros(1, 1, n, 1).expand(1, 1, n, m))
        for step in range(iterations // 2):
            columns = g.new_full((batch, heads, 1, m), -math.inf)
            for start, stop, _ in _blocks(q, k):
                z = _masked(logits(q[:, :, start:stop], k, scale, grouped), _part(mask, start, stop, m))
                rows = f[step, :, :, start:stop]
                rows.copy_(_negated((z if step == 0 else z + g[step - 1]).logsumexp(-1, keepdim=True)))
                torch.logaddexp(columns, z.add_(rows).logsumexp(-2, keepdim=True), out=columns)
            g[step] = _negated(columns, target)
        for start, stop, _ in _blocks(q, k):
            z = _masked(logits(q[:, :, start:stop], k, scale, grouped), _part(mask, start, stop, m))
            weights = _last_step(z, f, g, iterations, start, stop)
            out[:, :, start:stop] = apply_weights(dropout(weights)[0].to(v.dtype), v, grouped)
    return out, f, g


def _negated(x: Tensor, target: Tensor | float = 0.0) -> Tensor:
    """target − x, 0 where x is −inf: padding has no factor."""
    return (target - x).masked_fill_(x == -math.inf, 0)


def _last_step(z: Tensor, f: Tensor, g: Tensor, iterations: int, start: int, stop: int) -> Tensor:
    """The weights of a block [B, H, rows, M] from its logits and the factors; an odd last row step finds its own."""
    z = z + g[-1]
    return z.add_(_negated(z.logsumexp(-1, keepdim=True)) if iterations % 2 else f[-1, :, :, start:stop]).exp_()


@operator(
    "quest::sinkhorn_attention_backward",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor f, Tensor g, float scale, "
    "int iterations, float dropout_p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
)
def _sinkhorn_blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    f: Tensor,
    g: Tensor,
    scale: float,
    iterations: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    n, m = q.shape[2], k.shape[2]
    total = _Gradients(q, k, v, scale)
    grouped = total.grouped
    dropout = _Dropout(dropout_p, seed, q.device)
    grad_f, grad_g = torch.zeros_like(f[0]), torch.zeros_like(g[0])  # [B, H, N, 1], [B, H, 1, M]
    with no_autocast(q.device.type):
        target = _log_column_sum(mask, g.new_zeros(1, 1, n, 1).expand(1, 1, n, m))
        for start, stop, _ in _blocks(q, k):
            z = _masked(logits(q[:, :, start:stop], k, scale, grouped), _part(mask, start, stop, m))
            weights = _last_step(z, f, g, iterations, start, stop)
            change = logits(grad[:, :, start:stop], v, 1.0, grouped)  # of the weights after dropout
            dropped, change = dropout(weights, change)
            total.v += _back(dropped.to(v.dtype), grad[:, :, start:stop], k.shape[1])
            change = change * weights  # of the log weights
            row_sums = change.sum(-1, keepdim=True)
            if iterations % 2:
                change.addcmul_(weights, row_sums, value=-1)
            else:
                grad_f[:, :, start:stop] = row_sums
            grad_g += change.sum(-2, keepdim=True)
            total.add_logits(change, start, stop, m)
        # Back through the pairs of steps: g_s = target − lse_i(z + f_s), before it f_s = −lse_j(z + g_{s−1}).
        for step in reversed(range(iterations // 2)):
            earlier_g = torch.zeros_like(grad_g)
            for start, stop, _ in _blocks(q, k):
                z = _masked(logits(q[:, :, start:stop], k, scale, grouped), _part(mask, start, stop, m))
                z += f[step, :, :, start:stop]
                by_columns = (z + (g[step] - target)).exp_().mul_(grad_g)
                grad_rows = grad_f[:, :, start:stop] - by_columns.sum(-1, keepdim=True)
                by_rows = (z if step == 0 else z.add_(g[step - 1])).exp_().mul_(grad_rows)
                earlier_g -= by_rows.sum(-2, keepdim=True)
                total.add_logits(by_rows.add_(by_columns).neg_(), start, stop, m)
            grad_g = earlier_g
            grad_f.zero_()
    return total.result()


def _fake_sinkhorn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, iterations: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    steps, wide = iterations // 2, wider(q.dtype)
    f = q.new_empty(steps, *q.shape[:3], 1, dtype=wide)
    g = q.new_empty(steps, *q.shape[:2], 1, k.shape[2], dtype=wide)
    return q.new_empty(*q.shape[:3], v.shape[-1]), f, g


_sinkhorn_blocks.register_fake(_fake_sinkhorn)
_sinkhorn_blocks_backward.register_fake(_fake_gradients)
_sinkhorn_blocks_backward.register_autograd(partial(_second, "sinkhorn"), setup_context=_nothing)


def _sinkhorn_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.iterations, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(q, k, v, mask, output[1], output[2], seed)


def _sinkhorn_grad(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, f, g, seed = ctx.saved_tensors
    change = _sinkhorn_blocks_backward(grad, q, k, v, mask, f, g, ctx.scale, ctx.iterations, ctx.dropout_p, seed)
    return (*change, *[None] * 5)


_sinkhorn_blocks.register_autograd(_sinkhorn_grad, setup_context=_sinkhorn_setup)


_IN_BLOCKS = "O(N·M·D) time, O(N + M) memory in blocks of queries"

PARTS = (
    Part(
        "softmax",
        "normaliser",
        "exp(l) / Σ exp(l)",
        "Vaswani et al., 2017",
        Softmax,
        reference=reference.softmax,
        causal=True,
        cross=True,
        cached=True,
        dropout=True,
        fused=True,
        reads=(),
    ),
    Part(
        "sigmoid",
        "normaliser",
        "σ(l + b), b = −log of the visible keys",
        "Your Attention Matters, eq. 5; Ramapuram et al., 2024",
        Sigmoid,
        (Option("bias", float, None, "the constant b; null means −log of the row's visible keys", nullable=True),),
        reference=reference.sigmoid,
        causal=True,
        cross=True,
        cached=True,
        dropout=True,
        reads=("tokens",),
        complexity=_IN_BLOCKS,
    ),
    Part(
        "sinkhorn",
        "normaliser",
        "rows of exp(l/ε) to sum 1, columns to sum N/M, in turn",
        "Your Attention Matters, eq. 7–10; Sinkformers",
        Sinkhorn,
        (
            Option("iterations", int, 3, "half-steps, rows first; 1 is softmax, an odd number ends on rows", 1),
            Option("eps", float, 1.0, "temperature ε that the logits are divided by", 1e-6),
        ),
        reference=reference.sinkhorn,
        causal_reason="a lower-triangular doubly stochastic matrix is the identity",
        cross=True,
        dropout=True,
        reads=("tokens", "queries"),
        complexity="O(iterations·N·M·D) time, O(N + M) memory in blocks of queries",
    ),
)
