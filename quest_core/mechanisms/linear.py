"""The linear family: attention without a softmax, so that the products reassociate and no N×M weights are formed.

Both compute q_i · Σ_j k_j v_jᵀ over the keys that query i sees. Without causality that sum is one D×Dv matrix. With
it, tokens are taken in chunks: what a query gets from earlier chunks comes through the running sum at the start of its
chunk, what it gets from its own chunk through the C×C products inside. Sums are kept in float32 or wider.

[R] is Your Attention Matters, [C] Cottention (Mongaras et al., 2024).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Cache
from ..errors import UnsupportedError
from ..kernels.unit import unit
from .base import Dims, Family, local
from .part import Part

CHUNK = 64
"""Tokens a chunk: N·C for the products inside chunks, N·D·Dv/C for the sums between them."""

GROUP = 16
"""Chunks whose sums are accumulated in one product."""


class Linear(Family):
    """φ(q)(φ(k)ᵀ v) / φ(q)·Σφ(k) with φ(x) = elu(x) + 1 ([R], eq. 6; Katharopoulos et al., 2020)."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        seen = _visible(key_mask, k)
        dtype = _result_type(q)
        with torch.autocast(q.device.type, enabled=False):
            return _ratio(_sum_keys(_feature(q), _hide(_feature(k), seen), _with_ones(v), is_causal)).to(dtype)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        dtype = _result_type(q)
        with torch.autocast(q.device.type, enabled=False):
            keys = _hide(_feature(k), _visible(key_mask, k))
            return _ratio(_continue(_feature(q), keys, _with_ones(v), cache)).to(dtype)


class Cosine(Family):
    """q̄ (k̄ᵀ v) / n^σ(m_h), n the number of keys that the query sees ([C]; [R], eq. 11).

    m_h is learnable, one a head, and starts at 0.5. Weights can be negative and do not sum to 1.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.stabiliser = nn.Parameter(torch.full((dims.num_heads, 1, 1), 0.5))  # m: [H, 1, 1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        seen = _visible(key_mask, k)
        count = _count(q.shape[2], k.shape[2], seen, is_causal, q.device)
        dtype = _result_type(q)
        with torch.autocast(q.device.type, enabled=False):
            total = _sum_keys(unit(_wide(q)), _hide(unit(_wide(k)), seen), _wide(v), is_causal)
            return self._divide(total, count).to(dtype)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        seen = _visible(key_mask, k)
        new = torch.ones(1, q.shape[2], device=q.device) if seen is None else seen.to(torch.float32)  # [B or 1, N]
        if "count" in cache or seen is not None:
            before = cache["count"] if "count" in cache else q.new_full((q.shape[0], 1), cache.tokens, dtype=new.dtype)
            count = before + new.cumsum(-1)  # [B, N]
            cache["count"] = count[:, -1:]
        else:
            count = cache.tokens + new.cumsum(-1)
        dtype = _result_type(q)
        with torch.autocast(q.device.type, enabled=False):
            total = _continue(unit(_wide(q)), _hide(unit(_wide(k)), seen), _wide(v), cache)
            return self._divide(total, count[:, None, :, None]).to(dtype)

    def _divide(self, total: Tensor, count: Tensor) -> Tensor:
        """total [B, H, N, Dv] over n^σ(m), n from [..., N or 1, 1]; where n is 0 the total is too."""
        log_count = count.clamp(min=1).to(total.dtype).log()
        return total * torch.exp(-torch.sigmoid(local(self.stabiliser).to(total.dtype)) * log_count)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _result_type(q: Tensor) -> torch.dtype:
    """What a matrix product with `q` would give, which under autocast is the lower type."""
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        return torch.get_autocast_dtype(q.device.type)
    return q.dtype


def _feature(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 in float32 or wider, as exp(min(x, 0)) + max(x, 0), which does not cancel far below 0."""
    x = _wide(x)
    return x.clamp(max=0).exp() + x.relu()


def _with_ones(v: Tensor) -> Tensor:
    """[v, 1]: the sum of weights comes out of the same products as the weighted sum of values."""
    return F.pad(_wide(v), (0, 1), value=1.0)


def _ratio(total: Tensor) -> Tensor:
    """Weighted sums over sums of weights: [B, H, N, Dv + 1] -> [B, H, N, Dv]; 0 where no key has weight."""
    weight = total[..., -1:]
    return total[..., :-1] / torch.where(weight > 0, weight, 1)


def _visible(key_mask: Tensor | None, k: Tensor) -> Tensor | None:
    """[B or 1, M] booleans from a key mask.

    Raises:
        UnsupportedError: for an additive mask with values other than 0 and −inf.
    """
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool:
        hidden = key_mask == -math.inf
        plain = (hidden | (key_mask == 0)).all()
        message = (
            "linear and cosine attention have no logits that an additive mask could be added to: its values can be 0 "
            "(visible) or -inf (hidden) alone; pass a boolean mask, True = may be attended to"
        )
        if torch.compiler.is_compiling():
            torch._assert_async(plain, message)  # reading the value would break the graph
        elif not plain:
            raise UnsupportedError(message)
        key_mask = ~hidden
    return key_mask.expand(-1, k.shape[2])


def _hide(k: Tensor, seen: Tensor | None) -> Tensor:
    """Zero hidden keys [B, H, M, D], which then add nothing to any sum."""
    return k if seen is None else k.masked_fill(~seen[:, None, :, None], 0)


def _count(n: int, m: int, seen: Tensor | None, is_causal: bool, device: torch.device) -> Tensor:
    """How many keys each query sees, broadcastable to [B, H, N, 1]."""
    if not is_causal:
        if seen is None:
            return torch.full((1, 1), m, device=device)
        return seen.sum(-1)[:, None, None, None]
    last = torch.arange(m - n, m, device=device)  # [N]: the last key that each query sees; negative for none
    if seen is None:
        return last[:, None] + 1
    counts = F.pad(seen.cumsum(-1), (1, 0))  # [B or 1, M + 1]: visible keys before each
    return counts[:, (last + 1).clamp(min=0)][:, None, :, None]


def _sum_keys(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Σ_j (q_i · k_j) v_j over the keys that i sees: [B, H, N, D], [B, H, M, D], [B, H, M, E] -> [B, H, N, E]."""
    if not is_causal:
        return q @ (k.transpose(-1, -2) @ v)
    n, m = q.shape[2], k.shape[2]
    if n > m:  # the first queries come before all keys
        return F.pad(_scan(q[:, :, n - m :], k, v, None), (0, 0, n - m, 0))
    if n < m:  # the first keys come before all queries
        early = k[:, :, : m - n].transpose(-1, -2) @ v[:, :, : m - n]
        return _scan(q, k[:, :, m - n :], v[:, :, m - n :], early)
    return _scan(q, k, v, None)


def _continue(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
    """`_sum_keys` for the new tokens alone, after those whose sum the cache holds; extends it."""
    total = k.transpose(-1, -2) @ v  # [B, H, D, E]
    before = None
    if "sum" in cache:
        before = cache["sum"]
        total = before + total
    cache["sum"] = total
    if q.shape[2] == 1:
        return q @ total
    return _scan(q, k, v, before)


def _scan(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
    """q_i · (before + Σ_{j ≤ i} k_j v_jᵀ) for as many keys as queries, in chunks.

    Args:
        q, k: [B, H, N, D], v: [B, H, N, E].
        before: [B, H, D, E] or None for zero.

    Returns:
        [B, H, N, E].
    """
    n = q.shape[2]
    size = min(CHUNK, max(n, 1))
    fill = -n % size
    if fill:
        q, k, v = (F.pad(x, (0, 0, 0, fill)) for x in (q, k, v))
    # Contiguous once, or each product would copy anew.
    q, k, v = (x.contiguous().unflatten(2, (-1, size)) for x in (q, k, v))  # [B, H, n/C, C, D or E]
    out = (q @ k.transpose(-1, -2)).tril_() @ v
    if n > size:
        start = _sums_before((k.transpose(-1, -2) @ v).flatten(3)).unflatten(3, (k.shape[-1], v.shape[-1]))
        start = start if before is None else start + before[:, :, None]
    elif before is not None:
        start = before[:, :, None]
    else:
        return out.flatten(2, 3)[:, :, :n]
    shape = out.shape
    # One pass for product and sum: at these sizes a temporary costs more than its arithmetic.
    out = torch.baddbmm(out.flatten(0, 2), q.flatten(0, 2), start.flatten(0, 2)).view(shape)
    return out.flatten(2, 3)[:, :, :n]


def _sums_before(x: Tensor) -> Tensor:
    """The sum of all earlier rows, for every row: [B, H, R, F] -> [B, H, R, F].

    By triangular products in groups of rows and the same on the groups' totals: linear in R, several times faster than
    a cumulative sum over rows on a CPU, and unlike that one deterministic on a GPU.
    """
    count = x.shape[2]
    size = min(GROUP, count)
    x = F.pad(x, (0, 0, 0, -count % size)).unflatten(2, (-1, size))  # [B, H, R/size, size, F]
    earlier = torch.ones(size, size, dtype=x.dtype, device=x.device).tril(-1)
    sums = earlier @ x
    if x.shape[2] > 1:
        sums = sums + _sums_before(x.sum(3))[:, :, :, None]
    return sums.flatten(2, 3)[:, :, :count]


PARTS = (
    Part(
        "linear",
        "family",
        "φ(q)(φ(k)ᵀv) / φ(q)·Σφ(k), φ(x) = elu(x) + 1",
        "Your Attention Matters, eq. 6; Katharopoulos et al., 2020",
        Linear,
        mixes_tokens=True,
        dropout=False,
        weights=False,
        complexity="O((N + M)·D²) time, O((N + M)·D) memory; constant memory a decoded token",
    ),
    Part(
        "cosine",
        "family",
        "q̄ (k̄ᵀv) / n^σ(m), n the visible keys",
        "Cottention; Your Attention Matters, eq. 11",
        Cosine,
        learnable=True,
        mixes_tokens=True,
        dropout=False,
        weights=False,
        complexity="O((N + M)·D²) time, O((N + M)·D) memory; constant memory a decoded token",
    ),
)
