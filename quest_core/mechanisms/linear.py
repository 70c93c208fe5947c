"""The linear family: attention without a softmax, so that the products reassociate and no N×M weights are formed.

Both compute q_i · Σ_j k_j v_jᵀ over the keys that query i sees. Without causality that sum is one D×Dv matrix. If
causal, earlier chunks of tokens reach a query through the sum at the start of its chunk, its own chunk through the C×C
products inside. Sums are kept in float32 or wider. An additive mask b multiplies the weight of a key by exp(b).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Cache
from ..compat import is_compiling, is_eager, is_exporting, is_tracing, no_autocast, refuse_to_count_keys
from ..ops import local, result_type, unit, widen
from ..registry import register
from . import naive
from .base import Dims, Family

CHUNK = 64  # tokens a chunk: N·C for the products inside chunks, N·D·Dv/C for the sums between them


@register("linear", source="Your Attention Matters, eq. 6; Katharopoulos et al., 2020")
class Linear(Family):
    """φ(q)(φ(k)ᵀv) / φ(q)·Σφ(k), φ(x) = elu(x) + 1."""

    causal = cross = cached = compares = True
    reads = ("tokens",)
    complexity = "O((N + M)·D²) time, O((N + M)·D) memory; constant memory a decoded token"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool, cache: Cache | None = None
    ) -> Tensor:
        with no_autocast(q.device.type):
            out = self.attend(q, k, v, key_mask, is_causal, cache)
        return out.to(result_type(q))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, is_causal: bool, cache: Cache | None
    ) -> Tensor:
        """Return the output in float32 or wider; a cache changes only where the sums over keys begin."""
        relative = cache is None  # a cached sum is not relative to the mask of later keys
        keys = _hide(_feature(k), _relative(key_mask) if relative else key_mask)
        # [v, 1]: the sum of weights comes out of the same products as the weighted sum of values.
        total = _sum_keys(_feature(q), keys, F.pad(widen(v), (0, 1), value=1.0), is_causal, cache)
        weight = total[..., -1:]
        blind = weight <= 1e3 * torch.finfo(weight.dtype).tiny  # or quotients overflow; ONNX rounds it to 0
        # 1/w as s · 1/(w·s) with the constant s = 1/w: the derivative of 1/w overflows long before 1/w does.
        near = weight.detach().masked_fill(blind, 1).reciprocal()
        return total[..., :-1] * (near * (weight * near).masked_fill(blind, math.inf).reciprocal())

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, bias: Tensor, is_causal: bool) -> Tensor:
        q, k = (torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp()) for x in (q, k))
        weights = q @ k.mT * bias.exp() * seen
        return naive.ratio(weights @ v, weights.sum(-1, keepdim=True))


@register("cosine", source="Cottention; Your Attention Matters, eq. 11")
class Cosine(Linear):
    """q̄ (k̄ᵀv) / n^σ(m), n the visible keys.

    m is learnable, one per head, and starts at 0.5. Weights can be negative and do not sum to 1.
    """

    learnable = True

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.stabiliser = nn.Parameter(torch.full((dims.num_heads,), 0.5))  # m: [H]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, is_causal: bool, cache: Cache | None
    ) -> Tensor:
        refuse_to_count_keys("cosine")
        seen, n, m = _ones_where_visible(k, key_mask), q.shape[2], k.shape[2]
        count = seen.sum(-1, keepdim=True)  # [B, 1]
        if cache is not None:
            total, count = count, seen.cumsum(-1)  # [B, 1], [B, N]
            if "count" in cache:
                total, count = total + cache["count"], count + cache["count"]
            cache["count"] = total
        elif is_causal:
            end = torch.arange(m - n + 1, m + 1, device=q.device)  # [N]: one after the last key that each query may see
            count = F.pad(seen.cumsum(-1), (1, 0)).index_select(1, end.clamp(min=0))  # [B, N]
        out = _sum_keys(unit(widen(q)), _hide(unit(widen(k)), key_mask), widen(v), is_causal, cache)
        log_count = count.clamp(min=1).to(out.dtype).log()[:, None, :, None]  # of no key the sum is 0
        power = torch.sigmoid(local(self.stabiliser).to(out.dtype))[:, None, None]  # [H, 1, 1]
        return out * torch.exp(-power * log_count)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, bias: Tensor, is_causal: bool) -> Tensor:
        weights = naive.unit(q) @ naive.unit(k).mT * bias.exp() * seen
        count = seen.sum(-1, keepdim=True).clamp(min=1).to(q.dtype)
        return weights @ v / count ** torch.sigmoid(self.stabiliser)[:, None, None]


def _feature(x: Tensor) -> Tensor:
    """Return φ(x) = elu(x) + 1, float32 or wider, as exp(x − max(x, 0)) + max(x, 0): no cancellation far below 0."""
    x = widen(x)
    # Without clamp, whose derivative at its bound is 0 in PyTorch 2.15 and 1 before; here φ'(0) = 1.
    # The derivative written by hand takes half the passes of the recorded one.
    by_hand = x.requires_grad and torch.is_grad_enabled() and is_eager()
    return _feature_by_hand(x) if by_hand else (x - x.relu()).exp() + x.relu()


class _Feature(torch.autograd.Function):
    """`_feature` of x in float32 or wider; φ'(x) = min(φ(x), 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp(max=0).exp_().add_(x.relu())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out: Tensor = ctx.saved_tensors[0]
        return (torch.where(out > 1, 1.0, out) if torch.is_grad_enabled() else out.clamp(max=1)) * grad


_feature_by_hand: Callable[[Tensor], Tensor] = _Feature.apply


def _ones_where_visible(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return 1 for each visible key, else 0: [B, M] in float32, whose sums count them exactly."""
    if key_mask is None:
        return k.new_ones(k.shape[0], k.shape[2], dtype=torch.float32)
    seen = key_mask if key_mask.dtype == torch.bool else key_mask > -math.inf
    return seen.float().expand(k.shape[0], k.shape[2])


def _relative(key_mask: Tensor | None) -> Tensor | None:
    """Return an additive mask less a constant a sample, which cancels in a ratio of weights; exp cannot overflow."""
    if key_mask is None or key_mask.dtype == torch.bool:
        return key_mask
    key_mask = widen(key_mask)
    top = key_mask.detach().logsumexp(-1, keepdim=True)  # unlike a maximum, defined without keys
    return key_mask - top.masked_fill(top == -math.inf, 0)


def _hide(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return keys [B, H, M, D], 0 where hidden, and times exp(b) if the mask b is additive."""
    if key_mask is None:
        return k
    mask = key_mask[:, None, :, None]
    return k.masked_fill(~mask, 0) if mask.dtype == torch.bool else k * mask.to(k.dtype).exp()


def _sum_keys(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, cache: Cache | None) -> Tensor:
    """Return Σ_j (q_i · k_j) v_j over the keys that i sees: [B, H, N, D], [B, H, M, D], [B, H, M, E] -> [B, H, N, E].

    With a cache, k and v are only the new tokens, after those whose sum it holds; it is extended.
    """
    if cache is None:
        return _scan(q, k, v, None) if is_causal else q @ (k.transpose(-1, -2) @ v)
    before, total = None, k.transpose(-1, -2) @ v  # [B, H, D, E]
    if "sum" in cache:
        before = cache["sum"]
        total = before + total
    cache["sum"] = total
    return q @ total if q.shape[2] == 1 else _scan(q, k, v, before)


def _scan(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
    """Return q_i · (before + Σ_{j ≤ i + M − N} k_j v_jᵀ), by chunks of tokens that end at the last query and last key.

    Shapes as in `_sum_keys`; before [B, H, D, E], None for zero.
    """
    refuse_to_count_keys("linear")
    n, m = q.shape[2], k.shape[2]
    # Dynamo takes symbols for int too, and in PyTorch 2.5 it has no sym_max of numbers.
    plain = is_tracing() or (isinstance(n, int) and isinstance(m, int))
    tokens = max(n, m) if plain else torch.sym_max(n, m)
    # One graph for all lengths has chunks of one size, and two or more: one would be a case of its own.
    graph = is_compiling() or is_exporting()
    size = CHUNK if graph else min(CHUNK, max(tokens, 1))
    chunks = (tokens + (2 * size if graph else size) - 1) // size
    q, k, v = [_last_rows(x, chunks * size).unflatten(2, (-1, size)) for x in (q, k, v)]  # [B, H, chunks, C, D or E]
    sums = (k.transpose(-1, -2) @ v).cumsum(2)  # [B, H, chunks, D, E]
    first = torch.arange(chunks, device=q.device)[:, None, None] == 0
    earlier = sums.roll(1, 2).masked_fill(first, 0)
    if before is not None:
        earlier = earlier + before[:, :, None]
    out = (q @ k.transpose(-1, -2)).tril() @ v + q @ earlier
    return _last_rows(out.flatten(2, 3), n)


def _last_rows(x: Tensor, rows: int) -> Tensor:
    """Return the last rows of x [B, H, T, D], zeros before the first, as one contiguous tensor [B, H, rows, D]."""
    start = x.shape[2] - rows
    if is_exporting() and not is_tracing():  # torch.export cannot prove for all lengths that a slice or pad fits
        index = torch.arange(rows, device=x.device) + start
        return F.pad(x, (0, 0, 1, 0)).index_select(2, (index + 1).clamp(min=0))
    # Contiguous once, or each product would copy again.
    return F.pad(x, (0, 0, -start, 0)).contiguous()
