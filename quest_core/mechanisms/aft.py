"""The attention-free family: averages of values weighted feature by feature, gated by the query.

[A] is An Attention Free Transformer (Zhai et al.), arXiv 2105.14103. [B, H, T, D] is read as T tokens of H·D features,
and Y = σ(Q) ⊙ (the average of the values weighted by the softmax of K_t' + w_tt' over t'), [A] equation 2.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Cache
from ..compat import is_exporting_to_onnx, is_tracing, no_autocast, transform
from ..errors import InputError, UnsupportedError
from ..ops import local, result_type, widen
from ..registry import Option, register
from . import naive
from .aft_ops import aft_biased, finite
from .base import Dims, Family

QUERY = Option("query", bool, True, "gate the average with σ(query); false is the paper's ablation")
_LENGTH = Option("max_length", int, 1024, "the most tokens T_max that positions are learned for", 1)
_RANK = Option("rank", int, 128, "features r of a position, w = u vᵀ; null: a T_max×T_max table", 1, nullable=True)
_WINDOW = Option("window", int, 32, "the bias counts at distances smaller than this", 1)


def averages(
    name: str, keys: Tensor, values: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int
) -> Tensor:
    """Return `aft_biased` of keys and values [B, H, M, D] as [B, H, N, D].

    Raises UnsupportedError, which names attention `name`, where the operator has no rule, before PyTorch does.
    """
    recorder = "torch.jit.trace" if is_tracing() else "torch.onnx.export" if is_exporting_to_onnx() else None
    if what := transform() or recorder:
        raise UnsupportedError(
            f"attention '{name}' does not support {what}: it is one opaque operator; use attention 'linear', which "
            "consists of plain operations, or run it eagerly, with torch.compile or with torch.export"
        )
    # [T, B·H·D]: no copy for one sample as its projection left it.
    k, v = (x.permute(2, 0, 1, 3).reshape(x.shape[2], -1) for x in (keys, values))
    right = None if right is None else right.to(k.dtype)
    y: Tensor = aft_biased(k, v, left.to(k.dtype), right, causal, window)[0]  # [N, B·H·D]
    return y.reshape(y.shape[0], *values.shape[:2], values.shape[3]).permute(1, 2, 0, 3)


def merge(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and the value [B, H, 1, D] of one token that counts as much as all M > 0 tokens [B, H, M, D].

    The key is log Σ exp(keys), −inf if all are hidden; the value is the weighted average, then 0.
    """
    top = finite(keys.detach().amax(2, keepdim=True))  # [B, H, 1, D]
    weights = (keys - top).exp()
    total = weights.sum(2, keepdim=True)
    hidden = total == 0
    total = total.masked_fill(hidden, 1)
    return (top + total.log()).masked_fill(hidden, -math.inf), (weights * values).sum(2, keepdim=True) / total


def join_cache(cache: Cache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that a cache holds and then the new ones, [B, H, P + N, D] each."""
    if "state_k" not in cache:
        return keys, values
    return torch.cat([cache["state_k"], keys], 2), torch.cat([cache["state_v"], values], 2)


class AttentionFree(Family):
    """A gated average of the values. A subclass says which average: of all tokens, and of new ones after a cache's."""

    def __init__(self, dims: Dims | None, *, query: bool) -> None:
        super().__init__(dims)
        self.query = query

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool, cache: Cache | None = None
    ) -> Tensor:
        n = q.shape[2]
        self.check_lengths(n, k.shape[2] if cache is None else cache.tokens + n, is_causal)
        if v.shape[-1] != q.shape[-1]:
            raise InputError(f"v has head_dim {v.shape[-1]}; attention-free gates need that of q, {q.shape[-1]}")
        if q.numel() * k.numel() == 0:
            # These zeros give q, k, v and all parameters a gradient of 0 and not None: DDP waits for each.
            others = sum(x.flatten()[:0].sum() for x in (k, v, *self.parameters()))
            return q.masked_fill(torch.ones_like(q, dtype=torch.bool), 0) + others
        keys, values = widen(k), widen(v)
        if key_mask is not None:
            mask = key_mask[:, None, :, None]
            keys = keys.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else keys + mask.to(keys.dtype)
        y = self.average(n, keys, values, is_causal) if cache is None else self.decode(n, keys, values, cache)
        out = torch.sigmoid(q.to(y.dtype)) * y if self.query else y.expand_as(q)
        return out.to(result_type(q))

    def check_lengths(self, n: int, m: int, is_causal: bool) -> None:
        """Raise InputError or UnsupportedError if `n` queries cannot attend to `m` keys."""

    def average(self, n: int, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        """Return the averages [B, H, n or 1, D] that `n` queries see.

        Keys [B, H, M, D or 1] and values [B, H, M, D] are float32 or wider, and hidden keys −inf.
        """
        raise NotImplementedError

    def decode(self, n: int, keys: Tensor, values: Tensor, cache: Cache) -> Tensor:
        """Return the averages [B, H, n, D] of new tokens and those in the cache, which is extended."""
        raise NotImplementedError

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, bias: Tensor, is_causal: bool) -> Tensor:
        w = self.reference_bias(q.shape[2], k.shape[2], is_causal)
        keys = (k.mT + bias)[:, :, None].expand(-1, -1, q.shape[2], v.shape[3], -1)  # [B, H, N, D, M]
        logits = keys + w[..., None, :]
        average = (naive.softmax(logits, seen[:, :, :, None].expand(logits.shape)) * v.mT[:, :, None]).sum(-1)
        return torch.sigmoid(q) * average if self.query else average

    def reference_bias(self, n: int, m: int, is_causal: bool) -> Tensor:
        """Return w [N, M] or [H, N, M] by the plain formula."""
        return torch.zeros(n, m)


@register("aft-simple", source="[A] eq. 5", options=(QUERY,))
class AttentionFreeSimple(AttentionFree):
    """σ(Q_t) ⊙ Σ exp(K_t') V_t' / Σ exp(K_t').

    No bias: a key and feature have one weight, the same for all queries. A cache keeps one token that stands for all.
    """

    causal = cross = cached = True
    reads = ("tokens",)
    complexity = "O(T·d) time and memory, O(d) state while decoding"

    def average(self, n: int, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        if not is_causal:
            return merge(keys, values)[1]
        y, missing = self._running(keys, values), n - keys.shape[2]
        # The last query sees every key, and the first N − M queries of too few keys see none.
        return F.pad(y, (0, 0, missing, 0)) if missing > 0 else y[:, :, -missing:]

    def decode(self, n: int, keys: Tensor, values: Tensor, cache: Cache) -> Tensor:
        keys, values = join_cache(cache, keys, values)
        cache["state_k"], cache["state_v"] = last = merge(keys, values)
        return last[1] if n == 1 else self._running(keys, values)[:, :, -n:]

    @staticmethod
    def _running(keys: Tensor, values: Tensor) -> Tensor:
        """Return the average up to each token, [B, H, T, D]."""
        none = keys.new_empty(keys.shape[2], 0)  # no features of positions, so w = 0
        return averages("aft-simple(is_causal=True)", keys, values, none, none, True, 1)


@register("aft-full", source="[A] eq. 2, 7", options=(_LENGTH, _RANK, QUERY))
class AttentionFreeFull(AttentionFree):
    """σ(Q_t) ⊙ Σ exp(K_t' + w_tt') V_t' / Σ exp(K_t' + w_tt').

    w_tt' is a learned bias for each pair of positions, w = u vᵀ. Where q and k come from two sequences each counts its
    positions from 0, unless causal, where the last query stands at the last key. A cache keeps all keys and values.
    """

    causal = cross = cached = learnable = True
    reads = ("tokens", "order")
    complexity = "O(T²·(d + r)) time, O(T·(d + r)) memory"
    query_positions: Any  # u [T_max, r], or None
    key_positions: Any  # v [T_max, r], or None
    table: Any  # w [T_max, T_max] where `rank` is None, else None
    window: int  # w counts at distances smaller than this; 0 for all

    def __init__(self, dims: Dims | None, *, max_length: int, rank: int | None, query: bool) -> None:
        super().__init__(dims, query=query)
        self.max_length, self.window = max_length, 0

        def positions(width: int) -> nn.Parameter:
            # [A] section 5.1 writes N(0, 10⁻²); 10⁻² is read as the deviation.
            return nn.Parameter(nn.init.normal_(torch.empty(max_length, width), std=0.01))

        self.query_positions = self.key_positions = self.table = None
        if rank is None:
            self.table = positions(max_length)
        else:
            self.query_positions, self.key_positions = positions(rank), positions(rank)

    def bias(self, start: int, n: int, first: int, m: int) -> tuple[Tensor, Tensor | None]:
        """Return w of n queries from `start` on and m keys from `first` on: ([n, r], [m, r]) or ([n, m], None)."""
        if self.table is not None:
            return local(self.table)[start : start + n, first : first + m], None
        return local(self.query_positions)[start : start + n], local(self.key_positions)[first : first + m]

    def average(self, n: int, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        m = keys.shape[2]
        blind = max(n - m, 0) if is_causal else 0  # first queries, before every key
        w = self.bias(m - n + blind if is_causal else 0, n - blind, 0, m)
        return F.pad(averages(self.name, keys, values, *w, is_causal, self.window), (0, 0, blind, 0))

    def decode(self, n: int, keys: Tensor, values: Tensor, cache: Cache) -> Tensor:
        # Wide, or each step would widen all of them again.
        return self._last(n, cache.append("k", keys), cache.append("v", values), cache.tokens)

    def reference_bias(self, n: int, m: int, is_causal: bool) -> Tensor:
        place = torch.arange(n) + (m - n if is_causal else 0)
        table = self.query_positions @ self.key_positions.mT if self.table is None else self.table
        w: Tensor = table[place.clamp(min=0)][:, :m]
        return w * ((place[:, None] - torch.arange(m)).abs() < self.window) if self.window else w

    def check_lengths(self, n: int, m: int, is_causal: bool) -> None:
        if (tokens := max(n, m)) > self.max_length:
            raise InputError(
                f"attention '{self.name}': {tokens} tokens are more than max_length={self.max_length}; build it with "
                f"max_length={tokens} or more, or use 'aft-simple', which has no biases for positions"
            )

    def _last(self, n: int, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Return the averages [B, H, n, D] of `n` queries from position `start` on, with the last M keys and values."""
        m = keys.shape[2]
        if n > 1:
            return averages(self.name, keys, values, *self.bias(start, n, start + n - m, m), True, self.window)
        near = min(m, self.window or m)
        left, right = self.bias(start, 1, start + 1 - near, near)
        with no_autocast(keys.device.type):
            bias = left if right is None else left.to(keys.dtype) @ right.to(keys.dtype).T  # [1, near]
        bias = F.pad(bias.to(keys.dtype), (m - near, 0))  # [1, M]
        return merge(keys + bias.T, values)[1]


@register("aft-local", source="[A] eq. 4, 7", options=(_LENGTH, _RANK, QUERY, _WINDOW))
class AttentionFreeLocal(AttentionFreeFull):
    """aft-full with w_tt' = 0 where |t − t'| ≥ window.

    The sum is over all positions. A cache keeps the last `window` − 1 tokens, and one for all before them,
    which have no bias: it stands `window` tokens before the next query.
    """

    cross = False
    complexity = "O(T·window·(d + r)) time, O(T·(d + r)) memory; O(window·d) state while decoding"

    def __init__(self, dims: Dims | None, *, window: int, **positions: Any) -> None:
        super().__init__(dims, **positions)
        self.window = window

    def check_lengths(self, n: int, m: int, is_causal: bool) -> None:
        if not is_causal and n != m:
            raise UnsupportedError(
                f"attention '{self.name}' needs the distance of a query from a key, which the {n} queries and {m} keys "
                "of two sequences do not have; use 'aft-simple' or 'aft-full' to attend across"
            )
        super().check_lengths(n, m, is_causal)

    def decode(self, n: int, keys: Tensor, values: Tensor, cache: Cache) -> Tensor:
        keys, values = join_cache(cache, keys, values)
        out = self._last(n, keys, values, cache.tokens)
        far = keys.shape[2] - self.window + 1
        if far > 1:
            one = merge(keys[:, :, :far], values[:, :, :far])
            keys, values = (torch.cat([x, y[:, :, far:]], 2) for x, y in zip(one, (keys, values), strict=True))
        cache["state_k"], cache["state_v"] = keys, values  # [B, H, window, D] or fewer
        return out
