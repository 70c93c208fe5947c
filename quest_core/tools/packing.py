"""Attention over sequences of different lengths, packed along one token axis without padding.

On a GPU the variable-length flash kernels read packed sequences as they are. Elsewhere sequences of similar length
share a padded batch, because padding all sequences to the longest one costs O(N²) per sequence.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..compat import autocast_dtype, transform
from ..config import AttentionSpec
from ..errors import InputError, UnsupportedError
from ..mechanism import Mechanism, shared_mechanism

# The padded area of all buckets, the sum of sequences · N · M, is at most this many times the real area, Σ n · m. The
# bound limits memory and arithmetic on every machine alike. Within it there are as few buckets as possible.
WASTE = 1.25
FLASH_CAPABILITY = (8, 0)  # PyTorch's flash kernels need this compute capability (Ampere) or a later one
VARLEN_OPTIONS = {"scale", "window_size"}  # what PyTorch's variable-length attention must accept

# The piece of a packed call that the mechanism computes in this thread: its number from 0 on, and the queries that are
# not padding [B, N], or None if all are. A Monitor reads it.
PIECE: ContextVar[tuple[int, Tensor | None]] = ContextVar("PIECE", default=(0, None))


class _Bucket(NamedTuple):
    """Sequences that share a padded batch."""

    size: int
    n: int
    m: int
    queries: Tensor | None  # [size, N], True = real; None when nothing is padded
    keys: Tensor | None  # [size, M]


class _Take(NamedTuple):
    """Rows of a tensor by index."""

    rows: Tensor
    zeros: Tensor | None  # the places that become zeros instead

    def of(self, x: Tensor) -> Tensor:
        taken = x.index_select(0, self.rows)
        return taken if self.zeros is None else taken.index_fill_(0, self.zeros, 0)


# Index maps between packed tokens and padded rows. First: for each padded row, the token to copy, or zeros. Second: for
# each token, the row to read back, or zeros if its sequence has no keys or no queries.
_Moves: TypeAlias = tuple[_Take, _Take]


class _Layout(NamedTuple):
    buckets: list[_Bucket]
    q: _Moves | None  # None: the tokens as they lie are the rows
    k: _Moves | None


class PackingPlan:
    """Where packed sequences begin, and how to batch them; made once, used by every layer and step of the same lengths.

    >>> plan = PackingPlan(cu_seqlens)
    >>> for layer in layers:
    ...     out = attention_packed(q, k, v, "quest", cu_seqlens=plan)

    Lengths are copied from the GPU once. The variable-length kernels need no copy if the greatest lengths are given.

    Args:
        cu_seqlens_q: [B + 1], int32 (or int64), from 0 up to the number of query tokens, never falling: sequence b has
            the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: the same of keys and values; None in self-attention.
        max_seqlen_q, max_seqlen_k: tokens of the longest query and key sequence.

    Raises:
        InputError: wrong type or shape.
    """

    def __init__(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> None:
        for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if cu is not None and not isinstance(cu, Tensor):
                raise InputError(f"{name} is a {type(cu).__name__}; it needs a tensor of int32")
            if cu is not None and (cu.dim() != 1 or cu.shape[0] < 1 or cu.dtype not in (torch.int32, torch.int64)):
                raise InputError(f"{name} is {cu.dtype} of shape {list(cu.shape)}; it needs int32 of shape [B + 1]")
        self.cu_seqlens_q = self.cu_seqlens_k = cu_seqlens_q.to(torch.int32)
        self._longest = (max_seqlen_q, max_seqlen_q if max_seqlen_k is None else max_seqlen_k)
        if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
            one, other = len(cu_seqlens_q) - 1, len(cu_seqlens_k) - 1
            if one != other:
                raise InputError(f"cu_seqlens_q has {one} sequences and cu_seqlens_k {other}; both need as many")
            self.cu_seqlens_k, self._longest = cu_seqlens_k.to(torch.int32), (max_seqlen_q, max_seqlen_k)
        self._layouts: dict[tuple[float, torch.device], _Layout] = {}

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.cu_seqlens_k is self.cu_seqlens_q

    @functools.cached_property
    def offsets(self) -> tuple[list[int], list[int]]:
        """Where each sequence begins, and at last where all end: queries and keys, B + 1 each, on the host."""
        q: list[int] = self.cu_seqlens_q.tolist()
        k: list[int] = q if self.is_self else self.cu_seqlens_k.tolist()
        for name, offsets in (("cu_seqlens_q", q), ("cu_seqlens_k", k)):
            if offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
                raise InputError(f"{name} must start at 0 and not decrease; it starts with {offsets[:4]}")
        return q, k

    @functools.cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Queries n and keys m of every sequence; InputError if one is longer than `max_seqlen_q` or `max_seqlen_k`."""
        n, m = ([b - a for a, b in itertools.pairwise(offsets)] for offsets in self.offsets)
        for name, given, found in zip(("max_seqlen_q", "max_seqlen_k"), self._longest, (n, m), strict=True):
            if given is not None and given < max(found, default=0):
                raise InputError(f"{name} is {given}, and the longest sequence has {max(found)} tokens")
        return list(zip(n, m, strict=True))

    @functools.cached_property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest query sequence and of the longest key sequence."""
        n, m = self._longest
        return (
            max((n for n, _ in self.lengths), default=0) if n is None else n,
            max((m for _, m in self.lengths), default=0) if m is None else m,
        )

    def layout(self, waste: float, device: torch.device) -> _Layout:
        """Return the buckets on `device`; their padded area is at most `waste` times the real area."""
        if (waste, device) in self._layouts:
            return self._layouts[waste, device]
        groups = _group(self.lengths, waste)
        starts_q, starts_k = self.offsets
        moves_q, real_q = _moves(starts_q, groups, device)
        moves_k, real_k = (moves_q, real_q) if self.is_self else _moves(starts_k, groups, device)
        buckets = []
        for q, k in zip(real_q, real_k, strict=True):
            masks = (None if real.all() else real.to(device) for real in (q, k))
            buckets.append(_Bucket(len(q), q.shape[1], k.shape[1], *masks))
        made = self._layouts[waste, device] = _Layout(buckets, moves_q, moves_k)
        return made


def _group(lengths: Sequence[tuple[int, int]], waste: float) -> list[list[int]]:
    """Return the sequences of each bucket, without those that have no queries (no output) or no keys (zeros)."""
    groups: list[list[int]] = []
    closed = real = 0  # the padded area of all groups but the last, and the real area of all
    longest_n = longest_m = 0  # of the last group
    # Longest first: the padding that long sequences leave unused pays for joining the many lengths of short ones.
    # Equal lengths stay in the order of memory.
    for b in sorted((b for b, (n, m) in enumerate(lengths) if n and m), key=lengths.__getitem__, reverse=True):
        n, m = lengths[b]
        real += n * m
        if groups:
            wide_n, wide_m = max(longest_n, n), max(longest_m, m)
            if closed + (len(groups[-1]) + 1) * wide_n * wide_m <= waste * real:
                groups[-1].append(b)
                longest_n, longest_m = wide_n, wide_m
                continue
            closed += len(groups[-1]) * longest_n * longest_m
        groups.append([b])
        longest_n, longest_m = n, m
    return groups


def _moves(starts: list[int], groups: list[list[int]], device: torch.device) -> tuple[_Moves | None, list[Tensor]]:
    """Return how tokens become rows and back, and which rows of each bucket are real [size, N]."""
    offsets = torch.tensor(starts)
    tokens: list[Tensor] = [torch.zeros(0, dtype=torch.long)]
    reals: list[Tensor] = []
    for group in map(torch.tensor, groups):
        begin, length = offsets[group, None], (offsets[group + 1] - offsets[group])[:, None]  # [size, 1]
        position = torch.arange(int(length.max()))
        tokens.append((begin + torch.minimum(position, length - 1)).flatten())
        reals.append(position < length)
    token, total = torch.cat(tokens), starts[-1]
    if torch.equal(token, torch.arange(total)):
        return None, reals
    real = torch.cat([r.flatten() for r in reals]) if reals else token.bool()
    row = torch.full((total,), -1)
    row[token[real]] = torch.arange(token.shape[0])[real]

    def take(index: Tensor, zeros: Tensor) -> _Take:
        return _Take(index.to(device), zeros.nonzero().flatten().to(device) if zeros.any() else None)

    return (take(token, ~real), take(row.clamp(min=0), row < 0)), reals


class _Pick(torch.autograd.Function):
    """Rows by index. The backward pass gathers too, by the inverse index, and scatters no sums."""

    @staticmethod
    def forward(ctx: Any, there: _Take, back: _Take, x: Tensor) -> Tensor:
        ctx.there, ctx.back = there, back
        return there.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _pick(ctx.back, ctx.there, grad)


def _pick(there: _Take, back: _Take, x: Tensor) -> Tensor:
    # Function transforms derive PyTorch's own gathers.
    moved: Tensor = there.of(x) if transform() else _Pick.apply(there, back, x)  # type: ignore[no-untyped-call]
    return moved


def _waste(mechanism: Mechanism, plan: PackingPlan, is_causal: bool) -> float:
    """Return the allowed ratio of padded to real area: WASTE, 1 (no padding) or inf (one batch)."""
    reads = mechanism.reads
    # Padding moves a causal diagonal when n ≠ m.
    crossed = is_causal and not plan.is_self and any(n != m for n, m in plan.lengths)
    unpadded = crossed or "length" in reads
    if not ("samples" in reads or mechanism.chained):
        return 1.0 if unpadded else WASTE
    if unpadded:
        why = "cannot be causal where a packed sequence has another number of keys than of queries"
        if "length" in reads:
            why = "its result depends on the number of tokens, padding included"
        raise UnsupportedError(
            f"attention '{mechanism.config}' cannot be packed: it looks at the whole batch at once, and {why}; "
            "call it for one sequence at a time"
        )
    return math.inf


def _mask(bucket: _Bucket, mechanism: Mechanism) -> Tensor | None:
    """Return the mask of a bucket: [size, 1, 1, M] of keys; [size, 1, N, M] if queries depend on others."""
    keys = None if bucket.keys is None else bucket.keys[:, None, None, :]
    if bucket.queries is None or mechanism.family is not None or "queries" not in mechanism.reads:
        return keys
    queries = bucket.queries[:, None, :, None]
    return queries & keys if keys is not None else queries.expand(-1, -1, -1, bucket.m)


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: AttentionSpec | Mechanism = "quest",
    *,
    cu_seqlens: Tensor | PackingPlan,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the attention within each of many sequences; `is_causal` is aligned at the last query of each.

    >>> out = attention_packed(q, k, v, "quest", cu_seqlens=torch.tensor([0, 25, 40, 63], dtype=torch.int32))

    The result equals that of a loop over the sequences. On a GPU from Ampere on, a softmax over float16 or bfloat16
    without dropout goes through PyTorch's variable-length flash attention. Everything else runs in padded batches of
    sequences of similar length, whose padded area exceeds the real one by a quarter at most; elliptical scores and
    key-driven groupings, which look at the whole batch, in one.

    Args:
        q: queries [T, H, D].
        k: keys [S, G, D] and v: values [S, G, Dv]; S = T in self-attention.
        attention: a name, mapping or AttentionConfig without learnable parameters, or a Mechanism.
        cu_seqlens: where the sequences begin, int32 [B + 1]; a PackingPlan if they begin elsewhere in k and v, or for
            several layers.
        is_causal: query i of a sequence with n queries and m keys sees keys j ≤ i + m − n.
        dropout_p: dropout on the weights.

    Returns:
        [T, H, Dv]; zeros for the queries of a sequence that has no keys.

    Raises:
        InputError: shapes, types or lengths that do not fit together.
        ConfigError: unknown name or option, or a mechanism with learnable parameters given by name.
        UnsupportedError: as in `Mechanism.forward`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise InputError(f"{name} has shape {list(x.shape)}; packed it needs three axes: tokens, heads, features")
    if v.shape[:2] != k.shape[:2]:
        raise InputError(f"k has (tokens, heads) {tuple(k.shape[:2])} but v has {tuple(v.shape[:2])}")
    plan = cu_seqlens if isinstance(cu_seqlens, PackingPlan) else PackingPlan(cu_seqlens)
    mechanism = attention if isinstance(attention, Mechanism) else shared_mechanism(attention)
    if _varlen_applies(q, k, v, mechanism, plan, is_causal, dropout_p):
        return _varlen(q, k, v, mechanism, plan, is_causal)
    return _in_buckets(q, k, v, mechanism, plan, is_causal, dropout_p)


def _in_buckets(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, plan: PackingPlan, is_causal: bool, dropout_p: float
) -> Tensor:
    """Return the output [T, H, Dv] by padded batches."""
    for name, x, offsets in (("q", q, plan.offsets[0]), ("k", k, plan.offsets[1])):
        if x.shape[0] != offsets[-1]:
            raise InputError(f"{name} has {x.shape[0]} tokens, but its sequences end at {offsets[-1]}")
    layout = plan.layout(_waste(mechanism, plan, is_causal), q.device)
    if not layout.buckets:
        nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # zero, and part of the graph
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]) + nothing
    outs = []
    parts = (_split(x, layout, keys) for x, keys in ((q, False), (k, True), (v, True)))
    for number, (bucket, *batch) in enumerate(zip(layout.buckets, *parts, strict=True)):
        piece = PIECE.set((number, bucket.queries))
        try:
            out = mechanism(*batch, attn_mask=_mask(bucket, mechanism), is_causal=is_causal, dropout_p=dropout_p)
        finally:
            PIECE.reset(piece)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [size·N, H, Dv]
    rows = outs[0] if len(outs) == 1 else torch.cat(outs)
    return rows if layout.q is None else _pick(*layout.q[::-1], rows)


def _split(x: Tensor, layout: _Layout, keys: bool) -> list[Tensor]:
    """Return for each bucket a batch [size, H, N, D] of packed tokens [T, H, D], a view of all rows."""
    moves = layout.k if keys else layout.q
    rows = x if moves is None else _pick(*moves, x)  # [R, H, D]
    widths = [bucket.m if keys else bucket.n for bucket in layout.buckets]
    sizes = [bucket.size * width for bucket, width in zip(layout.buckets, widths, strict=True)]
    pieces = [rows] if len(sizes) == 1 else rows.split(sizes)
    return [piece.unflatten(0, (-1, width)).transpose(1, 2) for piece, width in zip(pieces, widths, strict=True)]


@functools.cache
def _varlen_attn(shared: bool) -> Callable[..., Any] | None:
    """Return PyTorch's variable-length attention if it has a scale, windows and, if `shared`, shared key heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = VARLEN_OPTIONS | ({"enable_gqa"} if shared else set())
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= needed else None


def flash_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's flash kernels compute in `dtype` on `device`."""
    half = dtype in (torch.float16, torch.bfloat16)
    return half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _varlen_applies(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, plan: PackingPlan, is_causal: bool, dropout_p: float
) -> bool:
    """Return whether the variable-length kernels compute this call."""
    dtype = autocast_dtype(q.device.type) or q.dtype
    return (
        varlen_computes(mechanism, q.device, dtype, q.shape[-1], q.shape[1] != k.shape[1], dropout_p)
        and mechanism.monitor is None
        and min(q.shape[0], k.shape[0]) > 0
        and q.shape[-1] == v.shape[-1]
        # Kernels differ in where the diagonal of a causal mask begins when n ≠ m.
        and (plan.is_self or not is_causal)
    )


def varlen_computes(
    mechanism: Mechanism, device: torch.device, dtype: torch.dtype, head_dim: int, shared: bool, dropout_p: float = 0.0
) -> bool:
    """Return whether the variable-length kernels compute a mechanism, in which key heads may be `shared`."""
    return (
        flash_runs(device, dtype)
        and _varlen_attn(shared) is not None
        and mechanism.fused
        and not mechanism.reads
        and dropout_p == 0
        and mechanism.score.scale(head_dim) > 0
        and head_dim <= 256
        and head_dim % 8 == 0  # rows of 16 bytes, which the kernels take for granted
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, plan: PackingPlan, is_causal: bool) -> Tensor:
    """Return the output [T, H, Dv] by the variable-length kernels."""
    if why := mechanism.grouping.mismatch(q.shape[1], k.shape[1]):
        raise InputError(f"attention '{mechanism.config}': {why}")
    dtype = autocast_dtype(q.device.type) or q.dtype
    # Scores work on [B, H, N, D]: all tokens of all sequences are one batch row.
    q, k, row_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    q, k, scale = mechanism.score(q, k, row_v, mask=None, is_causal=is_causal)
    shared = q.shape[1] != k.shape[1]
    varlen_attn = _varlen_attn(shared)
    assert varlen_attn is not None  # _varlen_applies says so
    out: Tensor = varlen_attn(
        *(_align(x.to(dtype)) for x in (q[0].transpose(0, 1), k[0].transpose(0, 1), v)),
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        *plan.longest,
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        **({"enable_gqa": True} if shared else {}),
    )
    return out


def _align(x: Tensor) -> Tensor:
    """Return x [T, H, D] of 2-byte numbers, copied unless every row begins at a multiple of 16 bytes."""
    steps = (x.stride(0), x.stride(1), x.storage_offset())
    return x if x.stride(2) == 1 and all(step % 8 == 0 for step in steps) else x.contiguous()
