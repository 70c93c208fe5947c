"""Normalisers: logits to weights. [R] is Your Attention Matters, [S] Sinkformers (Sander et al., 2022).

Softmax has fused kernels. Sigmoid and sinkhorn have none; where their weights are asked for or are small, they are
computed by the plain formula, and from `PLAIN_WEIGHTS` elements on in blocks of queries, forward and backward, so that
no [B, H, N, M] tensor exists at any time. Both ways are one formula: a block is the plain formula on some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Option, Part
from ..kernels import mode
from .base import Dims, Normaliser, apply_weights, causal_mask, logits, merge_causal

PLAIN_WEIGHTS = 2**23
"""With fewer weights a call, B·H·N·M, the plain formula is taken.

Measured forward and backward on a CPU core: below, keeping the weights is up to twice as fast as recomputing them
(batch 32, 6 heads, 197 tokens); from here on blocks that stay in cache are as fast (sigmoid) or faster (sinkhorn).
``python benchmarks/rules.py plain-weights`` repeats it.
"""

BLOCK_WEIGHTS = 2**20
"""Weights a block, unless that would be fewer than `BLOCK_ROWS` queries; see ``benchmarks/rules.py block-weights``."""

BLOCK_ROWS = 64
"""Least number of queries a block, below which matrix products are thin."""


class Softmax(Normaliser):
    """exp(l) / Σ exp(l) over the visible keys, through the fastest scaled_dot_product_attention that applies."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        # The kernels align causal masks at the first key; ours at the last, which differs for a cached prefix.
        if is_causal and (mask is not None or n != m):
            mask, is_causal = (None, False) if n == 1 and mask is None else (merge_causal(mask, n, m, q.device), False)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if scale <= 0:
            q, scale = q * scale, 1.0  # the kernels look for the largest product before they scale it
        if product_is_faster(q, k, mask=mask, is_causal=is_causal, dropout_p=dropout_p):
            return apply_weights(logits(q, k, scale).softmax(-1), v)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def weights(self, logits: Tensor, *, mask: Tensor | None, is_causal: bool) -> Tensor:
        if is_causal:
            mask = merge_causal(mask, logits.shape[-2], logits.shape[-1], logits.device)
        if mask is None:
            return logits.softmax(-1)
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        logits = logits.masked_fill(hidden, -math.inf) if mask.dtype == torch.bool else logits + mask
        blind = hidden.all(-1, keepdim=True)  # [B or 1, H or 1, N or 1, 1]: rows with no visible key
        # Two passes over the logits for a case that is rare; only a CPU can look first without waiting.
        if blind.device.type == "cpu" and not torch.compiler.is_compiling() and not blind.any():
            return logits.softmax(-1)
        return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def product_is_faster(q: Tensor, k: Tensor, *, mask: Tensor | None, is_causal: bool, dropout_p: float) -> bool:
    """Whether softmax(q kᵀ) v in three plain operations beats PyTorch's CPU kernel.

    That takes exponentials 16 at a time and the rest one by one, which shows while there are few keys. Measured with
    torch 2.13 on one core (AMD EPYC, AVX-512), batch times heads 128, head sizes 8 to 64 and 9 to 100 tokens, forward
    and backward: at the lengths tried inside these conditions (20 to 60) the plain formula took 0.48 to 0.92 of its
    time, elsewhere up to 2.0. ``python benchmarks/rules.py short-softmax`` repeats it.
    """
    return (
        mask is None
        and not is_causal
        and dropout_p == 0
        and q.is_cpu
        and q.dtype == torch.float32
        and suits_product(q.shape[2], k.shape[2], q.shape[3])
        and not torch.compiler.is_compiling()
        and mode() == "auto"
    )


def suits_product(n: int, m: int, dim: int) -> bool:
    """The sizes of `product_is_faster`: n queries, m keys and the features of a head."""
    return dim <= 32 and n > 16 and 16 < m < 64 and m % 16 >= 4


class Sigmoid(Normaliser):
    """σ(l + b): every weight on its own, so that a row need not sum to 1 ([R], eq. 5; Ramapuram et al., 2024).

    Args:
        bias: the constant b; None means −log of the number of keys that the row sees, which lets weights start out
            summing to about 1. A key under an additive mask is seen unless the mask is −inf.
    """

    def __init__(self, dims: Dims | None, *, bias: float | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        if not _in_blocks(q, k, mask):
            return super().forward(q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p)
        q, k, v = _autocast(q, k, v)
        out: Tensor = _sigmoid_blocks(q, k, v, mask, scale, self.bias, is_causal, dropout_p, _seed(dropout_p))
        return out

    def weights(self, logits: Tensor, *, mask: Tensor | None, is_causal: bool) -> Tensor:
        return _sigmoid(logits, mask, is_causal, self.bias)


class Sinkhorn(Normaliser):
    """Weights whose rows sum to 1 and whose columns share their mass evenly ([R], eq. 7–10; [S]).

    From exp(l/ε), half-steps alternate, rows first: scale every row to sum 1, then every column to sum N/M. Rows that
    see no key and columns that no row sees are padding: they take no mass, and N and M count the others alone. An odd
    number of half-steps ends on rows; one is softmax(l/ε). Additive masks are added to l, before the division by ε.

    A mask of keys alone, [B, 1, 1, M], leaves every query a row that takes its share of each column. Where padding
    tokens are queries too, as in self-attention, their rows must be hidden as well, for the others' result depends on
    it: `Mechanism.padding_mask` does that.

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
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        scale = scale / self.eps
        mask = mask if mask is None or mask.dtype == torch.bool else mask / self.eps
        if self.iterations == 1:
            softmax: Tensor = self.softmax(q, k, v, scale=scale, mask=mask, is_causal=is_causal, dropout_p=dropout_p)
            return softmax
        if not _in_blocks(q, k, mask):
            weights = _sinkhorn(logits(q, k, scale), mask, self.iterations)
            return apply_weights(torch.dropout(weights, dropout_p, dropout_p > 0), v)
        q, k, v = _autocast(q, k, v)
        out: Tensor = _sinkhorn_blocks(q, k, v, mask, scale, self.iterations, dropout_p, _seed(dropout_p))[0]
        return out

    def weights(self, logits: Tensor, *, mask: Tensor | None, is_causal: bool) -> Tensor:
        mask = mask if mask is None or mask.dtype == torch.bool else mask / self.eps
        return _sinkhorn(logits / self.eps, mask, self.iterations)


# The formulas, on all rows or on a block of them.


def _sigmoid(logits: Tensor, mask: Tensor | None, is_causal: bool, bias: float | None) -> Tensor:
    """Logits [B, H, N, M] -> weights [B, H, N, M]; mask and is_causal as in `Normaliser`."""
    n, m = logits.shape[-2:]
    seen = _seen(mask)  # broadcastable to [B, H, N, M]
    if is_causal and n > 1:
        causal = causal_mask(n, m, logits.device)
        seen = causal if seen is None else seen & causal
    shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None and mask.dtype != torch.bool:
        shifted = shifted + mask
    if bias is not None:
        shifted = shifted + bias
    elif seen is None:
        shifted = shifted - math.log(max(m, 1))
    else:
        keys = seen.expand(*seen.shape[:-1], m).sum(-1, keepdim=True)  # [..., N or 1, 1]
        shifted = shifted - keys.clamp(min=1).to(shifted.dtype).log()
    weights = shifted.sigmoid()
    if seen is not None:
        weights = weights.masked_fill(~seen, 0)
    return weights.to(logits.dtype)


def _sinkhorn(logits: Tensor, mask: Tensor | None, iterations: int) -> Tensor:
    """Logits over ε [B, H, N, M] -> weights [B, H, N, M] by `iterations` half-steps."""
    z = _masked(logits, mask)
    target = _log_column_sum(mask, z.shape[-2], z.shape[-1], z.dtype)
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
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is None:
        return z
    return z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)


def _seen(mask: Tensor | None) -> Tensor | None:
    """The mask as booleans."""
    return mask if mask is None or mask.dtype == torch.bool else mask > -math.inf


def _log_column_sum(mask: Tensor | None, n: int, m: int, dtype: torch.dtype) -> Tensor | float:
    """log(N/M), where N counts the rows that see a key and M the columns that a row sees: [B or 1, H or 1, 1, 1]."""
    seen = _seen(mask)
    if seen is None:
        return math.log(n / m) if n and m else 0.0
    rows, columns = seen.any(-1, keepdim=True), seen.any(-2, keepdim=True)
    rows = rows.expand(*rows.shape[:-2], n, 1).sum((-2, -1), keepdim=True)
    columns = columns.expand(*columns.shape[:-1], m).sum((-2, -1), keepdim=True)
    return rows.clamp(min=1).to(dtype).log() - columns.clamp(min=1).to(dtype).log()


def _log_sum_exp(x: Tensor, dim: int, masked: bool) -> Tensor:
    """log Σ exp(x) over `dim`, kept; 0 with zero gradients where all are −inf, where logsumexp's gradient is NaN."""
    if not masked:
        return x.logsumexp(dim, keepdim=True)
    top = x.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0)
    total = (x - top).exp().sum(dim, keepdim=True)
    return torch.where(total > 0, torch.where(total > 0, total, 1).log() + top, 0)


# Blocks of queries. Custom operators, so that torch.compile and torch.export see one node and not a loop.


def _in_blocks(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether the weights are too large to keep, and can be done without."""
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] < PLAIN_WEIGHTS:
        return False
    if mask is not None and mask.requires_grad:
        return False  # a learned bias is an N×M tensor itself, and so is its gradient
    return torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast would for a matrix product, which it cannot see inside a custom operator."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in tensors]


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

    Under a causal mask the last query of a block sees all its keys, so that a block is a causal problem in itself.
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


def _back(weights: Tensor, x: Tensor, groups: int) -> Tensor:
    """weightsᵀ x, summed over the query heads of a group: [B, H, N, M], [B, H, N, D] -> [B, G, M, D]."""
    batch, heads, n, m = weights.shape
    rows = heads // groups * n
    return weights.reshape(batch, groups, rows, m).transpose(-1, -2) @ x.reshape(batch, groups, rows, x.shape[-1])


class _Gradients:
    """Sums of gradients over blocks, in float32 or wider."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (torch.zeros_like(x, dtype=self.wide) for x in (q, k, v))
        self.inputs, self.scale = (q, k, v), scale

    def add_logits(self, grad: Tensor, start: int, stop: int, keys: int) -> None:
        """`grad` [B, H, rows, keys], of the logits of a block."""
        q, k, _ = self.inputs
        grad = grad.to(q.dtype)
        self.q[:, :, start:stop] += apply_weights(grad, k[:, :, :keys]) * self.scale
        self.k[:, :, :keys] += _back(grad, q[:, :, start:stop], k.shape[1]) * self.scale

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (total.to(x.dtype) for total, x in zip((self.q, self.k, self.v), self.inputs, strict=True))
        return q, k, v


@torch.library.custom_op(
    "quest::sigmoid_attention",
    mutates_args=(),
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
    drop = _Dropout(dropout_p, seed, q.device)
    with torch.autocast(q.device.type, enabled=False):
        for start, stop, keys in _blocks(q, k, is_causal):
            z = logits(q[:, :, start:stop], k[:, :, :keys], scale)
            weights = _sigmoid(z, _part(mask, start, stop, keys), is_causal, bias)
            out[:, :, start:stop] = apply_weights(drop(weights)[0], v[:, :, :keys])
    return out


@torch.library.custom_op(
    "quest::sigmoid_attention_backward",
    mutates_args=(),
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
    drop = _Dropout(dropout_p, seed, q.device)
    with torch.autocast(q.device.type, enabled=False):
        for start, stop, keys in _blocks(q, k, is_causal):
            z = logits(q[:, :, start:stop], k[:, :, :keys], scale)
            weights = _sigmoid(z, _part(mask, start, stop, keys), is_causal, bias)
            change = logits(grad[:, :, start:stop], v[:, :, :keys], 1.0)  # of the weights after dropout
            dropped, change = drop(weights, change)
            total.v[:, :, :keys] += _back(dropped, grad[:, :, start:stop], k.shape[1])
            wide = weights.to(total.wide)
            total.add_logits(change * wide * (1 - wide), start, stop, keys)
    return total.result()


@_sigmoid_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_sigmoid_blocks_backward.register_fake(_fake_gradients)


def _sigmoid_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.scale, ctx.bias, ctx.is_causal, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(q, k, v, mask, seed)


def _sigmoid_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, seed = ctx.saved_tensors
    change = _sigmoid_blocks_backward(grad, q, k, v, mask, ctx.scale, ctx.bias, ctx.is_causal, ctx.dropout_p, seed)
    return (*change, *[None] * 6)


_sigmoid_blocks.register_autograd(_sigmoid_grad, setup_context=_sigmoid_setup)


@torch.library.custom_op(
    "quest::sinkhorn_attention",
    mutates_args=(),
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
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, heads, n, v.shape[-1])
    f = q.new_empty(iterations // 2, batch, heads, n, 1, dtype=wide)
    g = q.new_empty(iterations // 2, batch, heads, 1, m, dtype=wide)
    drop = _Dropout(dropout_p, seed, q.device)
    with torch.autocast(q.device.type, enabled=False):
        target = _log_column_sum(mask, n, m, wide)
        for step in range(iterations // 2):
            columns = g.new_full((batch, heads, 1, m), -math.inf)
            for start, stop, _ in _blocks(q, k):
                z = _masked(logits(q[:, :, start:stop], k, scale), _part(mask, start, stop, m))
                rows = f[step, :, :, start:stop]
                rows.copy_(_negated((z if step == 0 else z + g[step - 1]).logsumexp(-1, keepdim=True)))
                torch.logaddexp(columns, z.add_(rows).logsumexp(-2, keepdim=True), out=columns)
            g[step] = _negated(columns, target)
        for start, stop, _ in _blocks(q, k):
            z = _masked(logits(q[:, :, start:stop], k, scale), _part(mask, start, stop, m))
            weights = _last_step(z, f, g, iterations, start, stop)
            out[:, :, start:stop] = apply_weights(drop(weights)[0].to(v.dtype), v)
    return out, f, g


def _negated(x: Tensor, target: Tensor | float = 0.0) -> Tensor:
    """target − x, 0 where x is −inf: padding has no factor."""
    return (target - x).masked_fill_(x == -math.inf, 0)


def _last_step(z: Tensor, f: Tensor, g: Tensor, iterations: int, start: int, stop: int) -> Tensor:
    """The weights of a block [B, H, rows, M] from its logits and the factors; an odd last row step finds its own."""
    z = z + g[-1]
    return z.add_(_negated(z.logsumexp(-1, keepdim=True)) if iterations % 2 else f[-1, :, :, start:stop]).exp_()


@torch.library.custom_op(
    "quest::sinkhorn_attention_backward",
    mutates_args=(),
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
    drop = _Dropout(dropout_p, seed, q.device)
    grad_f, grad_g = torch.zeros_like(f[0]), torch.zeros_like(g[0])  # [B, H, N, 1], [B, H, 1, M]
    with torch.autocast(q.device.type, enabled=False):
        target = _log_column_sum(mask, n, m, g.dtype)
        for start, stop, _ in _blocks(q, k):
            z = _masked(logits(q[:, :, start:stop], k, scale), _part(mask, start, stop, m))
            weights = _last_step(z, f, g, iterations, start, stop)
            change = logits(grad[:, :, start:stop], v, 1.0)  # of the weights after dropout
            dropped, change = drop(weights, change)
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
                z = _masked(logits(q[:, :, start:stop], k, scale), _part(mask, start, stop, m))
                z += f[step, :, :, start:stop]
                by_columns = (z + (g[step] - target)).exp_().mul_(grad_g)
                grad_rows = grad_f[:, :, start:stop] - by_columns.sum(-1, keepdim=True)
                by_rows = (z if step == 0 else z.add_(g[step - 1])).exp_().mul_(grad_rows)
                earlier_g -= by_rows.sum(-2, keepdim=True)
                total.add_logits(by_rows.add_(by_columns).neg_(), start, stop, m)
            grad_g = earlier_g
            grad_f.zero_()
    return total.result()


@_sinkhorn_blocks.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, iterations: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    steps, wide = iterations // 2, torch.promote_types(q.dtype, torch.float32)
    f = q.new_empty(steps, *q.shape[:3], 1, dtype=wide)
    g = q.new_empty(steps, *q.shape[:2], 1, k.shape[2], dtype=wide)
    return q.new_empty(*q.shape[:3], v.shape[-1]), f, g


_sinkhorn_blocks_backward.register_fake(_fake_gradients)


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
    Part("softmax", "normaliser", "exp(l) / Σ exp(l)", "Vaswani et al., 2017", Softmax),
    Part(
        "sigmoid",
        "normaliser",
        "σ(l + b), b = −log of the visible keys",
        "Your Attention Matters, eq. 5; Ramapuram et al., 2024",
        Sigmoid,
        (Option("bias", float, None, "the constant b; null means −log of the row's visible keys", nullable=True),),
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
        counts_queries=True,
        causal=False,
        causal_reason="a lower-triangular doubly stochastic matrix is the identity",
        cached=False,
        complexity="O(iterations·N·M·D) time, O(N + M) memory in blocks of queries",
    ),
)
