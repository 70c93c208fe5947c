"""The attention-free family: averages of values weighted feature by feature, gated by the query.

[A] is An Attention Free Transformer (Zhai et al.), arXiv 2105.14103. There are as many heads as features, so
[B, H, T, D] is read as T tokens of H·D features, and Y = σ(Q) ⊙ (the average of the values with the softmax of
K_t' + w_tt' over t' as weights), [A] equation 2. aft-conv is in `aft_conv`.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cache import Cache
from ..errors import InputError, UnsupportedError
from ..kernels.pytorch import autocast_dtype, no_autocast, require_operators, wider
from . import reference_aft
from .aft_ops import aft_biased, finite, refuse_transforms
from .base import Dims, Family, local
from .part import Option, Part


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or float64 where it is."""
    return x.to(wider(x.dtype))


def hide(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys [B, H, M, D] with the mask [B or 1, M] folded in: −inf where hidden, the bias added where additive."""
    if key_mask is None:
        return k
    mask = key_mask[:, None, :, None]
    return k.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else k + mask


def gate(q: Tensor, y: Tensor, query: bool) -> Tensor:
    """σ(q) ⊙ y, or y alone, in the type the caller computes in: q [B, H, N, D], y [B, H, N or 1, D]."""
    out = torch.sigmoid(q.to(y.dtype)) * y if query else y.expand_as(q)
    return out.to(autocast_dtype(q.device.type) or q.dtype)


def _rows(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [T, B·H·D]: no copy for one sample as its projection left it."""
    return x.permute(2, 0, 1, 3).reshape(x.shape[2], -1)


def _heads(rows: Tensor, like: Tensor) -> Tensor:
    """[N, B·H·D] -> [B, H, N, D] with B, H and D of `like`."""
    return rows.reshape(rows.shape[0], like.shape[0], like.shape[1], like.shape[3]).permute(1, 2, 0, 3)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Zeros [B, H, N, D] where there is no key or nothing at all, else None; InputError where v does not fit q."""
    if v.shape[-1] != q.shape[-1]:
        raise InputError(f"v has {v.shape[-1]} features a head and q {q.shape[-1]}; attention-free gates need the same")
    # Zeros that q has a gradient through, which is 0 too.
    return q.masked_fill(torch.ones_like(q, dtype=torch.bool), 0) if q.numel() * k.numel() == 0 else None


def _last_queries(y: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Averages of all keys' positions [..., M, C] -> of the queries' [..., N, C].

    The last query sees every key, and the first N − M queries of too few keys see none.
    """
    n, m = q.shape[2], k.shape[2]
    return functional.pad(y, (0, 0, n - m, 0)) if n > m else y[..., m - n :, :]


def _running(keys: Tensor, values: Tensor) -> Tensor:
    """The average up to each token as rows [T, B·H·D]: keys and values [B, H, T, D]."""
    average: Tensor = aft_biased(_rows(keys), _rows(values), None, None, True, 1)[0]
    return average


Sums: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Several tokens as one: (top, total, weighted), each [B, H, 1, D]. The sum of their weights is exp(top)·total, that of
the weighted values exp(top)·weighted. A top of −inf means that every token is hidden."""


def add_up(keys: Tensor, values: Tensor) -> Sums:
    """The sums over all tokens: keys and values [B, H, M, D], M > 0, float32 or wider."""
    if keys.shape[2] == 1:
        seen = (keys > -math.inf).to(keys.dtype)
        return keys, seen, values * seen
    top = keys.detach().amax(2, keepdim=True)  # [B, H, 1, D]
    weights = (keys - finite(top)).exp_()  # [B, H, M, D]
    return top, weights.sum(2, keepdim=True), (weights * values).sum(2, keepdim=True)


def join(one: Sums, other: Sums) -> Sums:
    """The sums over the tokens of both, exact whatever their sizes."""
    top = torch.maximum(one[0], other[0]).detach()
    base = finite(top)
    x, y = (one[0] - base).exp_(), (other[0] - base).exp_()
    return top, one[1] * x + other[1] * y, one[2] * x + other[2] * y


def average(sums: Sums) -> Tensor:
    """[B, H, 1, D]; 0 where every token is hidden."""
    return sums[2] / torch.where(sums[1] > 0, sums[1], 1)


def as_token(sums: Sums) -> tuple[Tensor, Tensor]:
    """The key and the value [B, H, 1, D] of one token that counts as much as all those."""
    seen = sums[1] > 0
    return torch.where(seen, sums[0] + torch.where(seen, sums[1], 1).log(), -math.inf), average(sums)


def kept(cache: Cache, name: str) -> Sums | None:
    """The sums that earlier steps have put into the cache as one tensor [B, H, 3, D]."""
    if name not in cache:
        return None
    top, total, weighted = cache[name].split(1, 2)
    return top, total, weighted


def after(earlier: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of earlier tokens [B, H, P, D] and of new ones [B, H, N, D] -> [B, H, P + N, D]."""
    return torch.cat([earlier[0], keys], dim=2), torch.cat([earlier[1], values], dim=2)


def visible(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Wide keys and values [B, H, M, D] of which nothing hidden is left: −inf and 0."""
    keys, values = hide(widen(k), key_mask), widen(v)
    return keys, values if key_mask is None else values.masked_fill(keys == -math.inf, 0)


class AttentionFreeSimple(Family):
    """No bias: one weight for a key and feature, whoever asks. [A] equation 5."""

    def __init__(self, dims: Dims | None, *, query: bool) -> None:
        super().__init__()
        self.query = query

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """See `Family.forward`."""
        if (empty := nothing(q, k, v)) is not None:
            return empty
        keys, values = hide(widen(k), key_mask), widen(v)
        if not is_causal:
            e = (keys - finite(keys.detach().amax(2, keepdim=True))).exp()  # [B, H, M, D]
            total = e.sum(2, keepdim=True)
            return gate(q, (e * values).sum(2, keepdim=True) / torch.where(total > 0, total, 1), self.query)
        refuse_transforms("aft-simple(is_causal=True)")
        y = _running(keys, values)
        return gate(q, _heads(_last_queries(y, q, k), v), self.query)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """See `Family.decode`. The state is the sums over all earlier tokens, three numbers a feature."""
        if (empty := nothing(q, k, v)) is not None:
            return empty
        keys, values = visible(k, v, key_mask)
        sums = add_up(keys, values)
        before = kept(cache, "sums")
        if before is not None:
            sums = join(before, sums)
        cache["sums"] = torch.cat(sums, dim=2)  # [B, H, 3, D]
        if q.shape[2] == 1:
            return gate(q, average(sums), self.query)
        require_operators("aft-simple")
        if before is not None:
            keys, values = after(as_token(before), keys, values)
        y = _running(keys, values)
        return gate(q, _heads(y[-q.shape[2] :], v), self.query)


class AttentionFreeFull(Family):
    """A learned bias w_tt' for every two positions. [A] equation 2, with w = u vᵀ by equation 7.

    Attributes:
        query_positions: u [T_max, r], or None.
        key_positions: v [T_max, r], or None.
        table: w [T_max, T_max] where `rank` is None, else None.
        window: w counts at distances smaller than this; 0 for all.
    """

    name = "aft-full"

    def __init__(self, dims: Dims | None, *, max_length: int, rank: int | None, query: bool) -> None:
        super().__init__()
        self.query, self.max_length, self.window = query, max_length, 0

        def positions(width: int) -> nn.Parameter:
            # [A] section 5.1 writes N(0, 10⁻²); 10⁻² is read as the deviation.
            return nn.Parameter(nn.init.normal_(torch.empty(max_length, width), std=0.01))

        self.query_positions = self.key_positions = self.table = None
        if rank is None:
            self.table = positions(max_length)
        else:
            self.query_positions, self.key_positions = positions(rank), positions(rank)

    def bias(self, start: int, n: int, first: int, m: int) -> tuple[Tensor, Tensor | None]:
        """w of n queries from position `start` on and m keys from `first` on: ([n, r], [m, r]) or ([n, m], None)."""
        if self.table is not None:
            return local(self.table)[start : start + n, first : first + m], None
        assert self.query_positions is not None
        assert self.key_positions is not None
        return local(self.query_positions)[start : start + n], local(self.key_positions)[first : first + m]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """See `Family.forward`. Where q and k come from two sequences each counts its positions from 0, unless
        causal, where the last query stands at the last key.

        Raises:
            InputError: more tokens than `max_length`.
        """
        n, m = q.shape[2], k.shape[2]
        self._check_length(max(n, m))
        if (empty := nothing(q, k, v)) is not None:
            return empty
        refuse_transforms(self.name)
        blind = max(n - m, 0) if is_causal else 0  # first queries, before every key
        left, right = self.bias(m - n + blind if is_causal else 0, n - blind, 0, m)
        keys, values = _rows(hide(widen(k), key_mask)), _rows(widen(v))
        left, right = left.to(keys.dtype), None if right is None else right.to(keys.dtype)
        y, _ = aft_biased(keys, values, left, right, is_causal, self.window)
        return gate(q, _heads(functional.pad(y, (0, 0, blind, 0)), v), self.query)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """See `Family.decode`. Biases differ from query to query, so all keys and values are kept."""
        start = cache.tokens
        self._check_length(start + q.shape[2])
        if (empty := nothing(q, k, v)) is not None:
            return empty
        keys, values = visible(k, v, key_mask)  # wide, or each step would widen all of them again
        keys, values = cache.append("k", keys), cache.append("v", values)  # [B, H, M, D]
        if q.shape[2] > 1:
            return self._several(q, keys, values, start)
        return gate(q, average(self._one(keys, values, start)), self.query)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise InputError(
                f"attention '{self.name}': {tokens} tokens are more than max_length={self.max_length}, for "
                f"whose positions it has biases; build it with max_length={tokens} or more, or use 'aft-simple', "
                "which has none"
            )

    def _one(self, keys: Tensor, values: Tensor, start: int) -> Sums:
        """The sums that the query at position `start` sees: keys and values [B, H, M, D] of the last M tokens."""
        m = keys.shape[2]
        left, right = self.bias(start, 1, start + 1 - m, m)
        with no_autocast(keys.device.type):
            w = left if right is None else left.to(keys.dtype) @ right.to(keys.dtype).T  # [1, M]
        return add_up(keys + w.to(keys.dtype)[:, :, None], values)

    def _several(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """The output [B, H, N, D] of the queries from position `start` on: keys and values of the last M tokens."""
        require_operators(self.name)
        n, m = q.shape[2], keys.shape[2]
        left, right = self.bias(start, n, start + n - m, m)
        left, right = left.to(keys.dtype), None if right is None else right.to(keys.dtype)
        y, _ = aft_biased(_rows(keys), _rows(values), left, right, True, self.window)
        return gate(q, _heads(y, values), self.query)


class AttentionFreeLocal(AttentionFreeFull):
    """The bias inside a window alone, the sum still over all positions. [A] equation 4."""

    name = "aft-local"

    def __init__(self, dims: Dims | None, *, max_length: int, rank: int | None, query: bool, window: int) -> None:
        super().__init__(dims, max_length=max_length, rank=rank, query=query)
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """See `AttentionFreeFull.forward`.

        Raises:
            UnsupportedError: q and k of different lengths, not causal: between two sequences there is no distance.
        """
        if not is_causal and q.shape[2] != k.shape[2]:
            raise UnsupportedError(
                f"attention '{self.name}' needs the distance of a query from a key, which the {q.shape[2]} queries and "
                f"{k.shape[2]} keys of two sequences do not have; use 'aft-simple' or 'aft-full' to attend across"
            )
        return super().forward(q, k, v, key_mask=key_mask, is_causal=is_causal)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """See `Family.decode`. The state is the last `window` − 1 tokens, and the sums over those before them, which
        have no bias."""
        start, near = cache.tokens, self.window - 1
        self._check_length(start + q.shape[2])
        if (empty := nothing(q, k, v)) is not None:
            return empty
        keys, values = visible(k, v, key_mask)
        if "recent_k" in cache:
            keys, values = after((cache["recent_k"], cache["recent_v"]), keys, values)  # [B, H, near + N, D] or fewer
        far = kept(cache, "far")
        if q.shape[2] > 1:
            # A token for all of the far ones stands right before the `near`: no query is closer to it than `window`.
            out = self._several(q, *(after(as_token(far), keys, values) if far else (keys, values)), start)
        else:
            sums = self._one(keys, values, start)
            out = gate(q, average(join(far, sums) if far else sums), self.query)
        leave = keys.shape[2] - near
        if leave > 0:
            sums = add_up(keys[:, :, :leave], values[:, :, :leave])
            cache["far"] = torch.cat(join(far, sums) if far else sums, dim=2)  # [B, H, 3, D]
            keys, values = keys[:, :, leave:].clone(), values[:, :, leave:].clone()
        cache["recent_k"], cache["recent_v"] = keys, values  # [B, H, near, D] or fewer
        return out


QUERY = Option("query", bool, True, "gate the average with σ(query); false is the paper's ablation")
_LENGTH = Option("max_length", int, 1024, "the most tokens T_max that positions are learned for", 1)
_RANK = Option("rank", int, 128, "features r of a position, w = u vᵀ; null: a T_max×T_max table", 1, nullable=True)
_WINDOW = Option("window", int, 32, "the bias counts at distances smaller than this", 1)

PARTS = (
    Part(
        "aft-full",
        "family",
        "σ(Q_t) ⊙ Σ exp(K_t' + w_tt') V_t' / Σ exp(K_t' + w_tt')",
        "[A] eq. 2, 7",
        AttentionFreeFull,
        (_LENGTH, _RANK, QUERY),
        learnable=True,
        reference=reference_aft.family,
        causal=True,
        cross=True,
        cached=True,
        reads=("tokens", "order"),
        complexity="O(T²·(d + r)) time, O(T·(d + r)) memory",
    ),
    Part(
        "aft-local",
        "family",
        "aft-full with w_tt' = 0 where |t − t'| ≥ window",
        "[A] eq. 4, 7",
        AttentionFreeLocal,
        (_LENGTH, _RANK, QUERY, _WINDOW),
        learnable=True,
        reference=reference_aft.family,
        causal=True,
        cached=True,
        reads=("tokens", "order"),
        complexity="O(T·window·(d + r)) time, O(T·(d + r)) memory; O(window·d) state while decoding",
    ),
    Part(
        "aft-simple",
        "family",
        "σ(Q_t) ⊙ Σ exp(K_t') V_t' / Σ exp(K_t')",
        "[A] eq. 5",
        AttentionFreeSimple,
        (QUERY,),
        reference=reference_aft.family,
        causal=True,
        cross=True,
        cached=True,
        reads=("tokens",),
        complexity="O(T·d) time and memory, O(d) state while decoding",
    ),
)
