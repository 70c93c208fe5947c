"""The attention-free family: averages of values weighted feature by feature, gated by the query.

[A] is An Attention Free Transformer (Zhai et al.), arXiv 2105.14103. There are as many heads as features, so
[B, H, T, D] is read as T tokens of H·D features, and Y = σ(Q) ⊙ (the average of the values with the softmax of
K_t' + w_tt' over t' as weights), [A] equation 2. aft-conv is in `aft_conv`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cache import Cache
from ..errors import InputError, UnsupportedError
from .aft_ops import aft_biased, aft_running, finite
from .base import Dims, Family, local
from .part import Option, Part


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def hide(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys [B, H, M, D] with the mask [B or 1, M] folded in: −inf where hidden, the bias added where additive."""
    if key_mask is None:
        return k
    mask = key_mask[:, None, :, None]
    return k.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else k + mask


def gate(q: Tensor, y: Tensor, query: bool) -> Tensor:
    """σ(q) ⊙ y, or y alone, in the type the caller computes in: q [B, H, N, D], y [B, H, N or 1, D]."""
    out = torch.sigmoid(q.to(y.dtype)) * y if query else y.expand_as(q)
    device = q.device.type
    return out.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype)


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
    return torch.zeros_like(q) if 0 in (*q.shape, *k.shape) else None


def _last_queries(y: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Averages of all keys' positions [..., M, C] -> of the queries' [..., N, C].

    The last query sees every key, and the first N − M queries of too few keys see none.
    """
    n, m = q.shape[2], k.shape[2]
    return functional.pad(y, (0, 0, n - m, 0)) if n > m else y[..., m - n :, :]


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
        y, _ = aft_running(_rows(keys), _rows(values))
        return gate(q, _heads(_last_queries(y, q, k), v), self.query)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """See `Family.decode`. All earlier tokens act as one, whose key is their log normaliser and whose value is
        their average: so the state is two numbers a feature."""
        keys, values = hide(widen(k), key_mask), widen(v)
        if "normaliser" in cache:
            keys = torch.cat([cache["normaliser"], keys], dim=2)
            values = torch.cat([cache["average"], values], dim=2)
        y, normaliser = aft_running(_rows(keys), _rows(values))
        cache["average"] = _heads(y[-1:], v).contiguous()
        cache["normaliser"] = _heads(normaliser[-1:], v).contiguous()
        return gate(q, _heads(y[keys.shape[2] - q.shape[2] :], v), self.query)


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

    def bias(self, start: int, n: int, m: int) -> tuple[Tensor, Tensor | None]:
        """w of queries at `start` … `start` + n − 1 and keys at 0 … m − 1: ([n, r], [m, r]) or ([n, m], None)."""
        if self.table is not None:
            return local(self.table)[start : start + n, :m], None
        assert self.query_positions is not None
        assert self.key_positions is not None
        return local(self.query_positions)[start : start + n], local(self.key_positions)[:m]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """See `Family.forward`. Where q and k come from two sequences each counts its positions from 0, unless
        causal, where the last query stands at the last key.

        Raises:
            InputError: more tokens than `max_length`.
        """
        n, m = q.shape[2], k.shape[2]
        if max(n, m) > self.max_length:
            raise InputError(
                f"attention '{self.name}': {max(n, m)} tokens are more than max_length={self.max_length}, for "
                f"whose positions it has biases; build it with max_length={max(n, m)} or more, or use 'aft-simple', "
                "which has none"
            )
        if (empty := nothing(q, k, v)) is not None:
            return empty
        blind = max(n - m, 0) if is_causal else 0  # first queries, before every key
        left, right = self.bias(m - n + blind if is_causal else 0, n - blind, m)
        keys, values = _rows(hide(widen(k), key_mask)), _rows(widen(v))
        left, right = left.to(keys.dtype), None if right is None else right.to(keys.dtype)
        y, _ = aft_biased(keys, values, left, right, is_causal, self.window)
        return gate(q, _heads(functional.pad(y, (0, 0, blind, 0)), v), self.query)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """See `Family.decode`. Biases differ from query to query, so all keys and values are kept."""
        return self.forward(
            q, cache.append("k", hide(k, key_mask)), cache.append("v", v), key_mask=None, is_causal=True
        )


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
        ordered=True,
        mixes_tokens=True,
        dropout=False,
        weights=False,
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
        cross=False,
        ordered=True,
        mixes_tokens=True,
        dropout=False,
        weights=False,
        complexity="O(T·window·(d + r)) time, O(T·(d + r)) memory",
    ),
    Part(
        "aft-simple",
        "family",
        "σ(Q_t) ⊙ Σ exp(K_t') V_t' / Σ exp(K_t')",
        "[A] eq. 5",
        AttentionFreeSimple,
        (QUERY,),
        mixes_tokens=True,
        dropout=False,
        weights=False,
        complexity="O(T·d) time and memory, O(d) state while decoding",
    ),
)
