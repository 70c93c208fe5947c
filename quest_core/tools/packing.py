"""Attention over sequences of different lengths, packed along one token axis without padding.

On a GPU the variable-length flash kernels read packed sequences as they are. Elsewhere sequences of similar length
share a padded batch, because padding all sequences to the longest one costs O(N²) per sequence.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import AttentionSpec
from ..errors import InputError, UnsupportedError
from ..mechanism import Mechanism, shared_mechanism
from ..ops import result_type

# The padded area of all buckets, the sum of sequences · N², is at most this many times the real area, Σ n². The bound
# limits memory and arithmetic on every machine alike. Within it there are as few buckets as possible.
WASTE = 1.25
FLASH_CAPABILITY = (8, 0)  # PyTorch's flash kernels need this compute capability (Ampere) or a later one
VARLEN_OPTIONS = {"scale", "window_size"}  # what PyTorch's variable-length attention must accept

# The piece of a packed call that the mechanism computes in this thread: its number from 0 on, and the queries that are
# not padding [B, N], or None without padding. A Monitor reads it.
PIECE: ContextVar[tuple[int, Tensor | None]] = ContextVar("PIECE", default=(0, None))


class _Layout(NamedTuple):
    """How sequences share padded batches, called buckets. Padding repeats the last token of its sequence.

    Sequences of 3, 4 and 4 tokens are one bucket, [[3, 4, 5, 6], [7, 8, 9, 10], [0, 1, 2, 2]], whose last token is not
    real, and the places are [8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7].
    """

    tokens: list[Tensor]  # for each bucket, the token at each place of its batch [size, N]
    real: list[Tensor | None]  # for each bucket, False at padding [size, N]; None without padding
    places: Tensor | None  # the place of each token among those of all buckets [T]; None if all are in order


class PackingPlan:
    """Where packed sequences begin, and how to batch them; made once, used by every layer and step of the same lengths.

    >>> plan = PackingPlan(cu_seqlens)
    >>> for layer in layers:
    ...     out = attention_packed(q, k, v, "quest", cu_seqlens=plan)

    Lengths are copied from the GPU once. The variable-length kernels need no copy if the greatest length is given.

    Args:
        cu_seqlens: [B + 1], int32 (or int64), from 0 up to the number of tokens, never falling: sequence b has the
            tokens cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: tokens of the longest sequence, or more.

    Raises:
        InputError: wrong type or shape.
    """

    def __init__(self, cu_seqlens: Tensor, *, max_seqlen: int | None = None) -> None:
        if not isinstance(cu_seqlens, Tensor):
            raise InputError(f"cu_seqlens is a {type(cu_seqlens).__name__}; it needs a tensor of int32")
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"cu_seqlens is {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}; it needs int32 of shape [B + 1]"
            )
        self.cu_seqlens, self._longest = cu_seqlens.to(torch.int32), max_seqlen
        self._layouts: dict[tuple[float, torch.device], _Layout] = {}

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of every sequence; InputError if `cu_seqlens` is not as above, or a sequence is too long."""
        starts = self.cu_seqlens.tolist()
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        if starts[0] != 0 or min(lengths, default=0) < 0:
            raise InputError(f"cu_seqlens must start at 0 and not decrease; it starts with {starts[:4]}")
        if self._longest is not None and self._longest < max(lengths, default=0):
            raise InputError(f"max_seqlen is {self._longest}, and the longest sequence has {max(lengths)} tokens")
        return lengths

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, or `max_seqlen`."""
        return max(self.lengths, default=0) if self._longest is None else self._longest

    def layout(self, waste: float, device: torch.device) -> _Layout:
        """Return the buckets on `device`; their padded area is at most `waste` times the real area."""
        if (waste, device) not in self._layouts:
            with torch.inference_mode(False):  # because a training step may use them after an evaluation
                self._layouts[waste, device] = _lay_out(self.lengths, waste, device)
        return self._layouts[waste, device]


def _choose_buckets(lengths: list[int], waste: float) -> list[list[int]]:
    """Return the sequences of each bucket, without empty ones."""
    buckets: list[list[int]] = []
    closed = real = 0  # the padded area of all buckets but the last, and the real area of all
    # Longest first: the padding that long sequences leave unused pays for joining the many lengths of short ones.
    # Equal lengths stay in the order of memory.
    for b in sorted((b for b, n in enumerate(lengths) if n), key=lengths.__getitem__, reverse=True):
        real += lengths[b] ** 2
        last = lengths[buckets[-1][0]] ** 2 if buckets else 0  # what each sequence of the last bucket takes
        if buckets and closed + (len(buckets[-1]) + 1) * last <= waste * real:
            buckets[-1].append(b)
        else:
            closed += len(buckets[-1]) * last if buckets else 0
            buckets.append([b])
    return buckets


def _lay_out(lengths: list[int], waste: float, device: torch.device) -> _Layout:
    """Return the layout on `device` of sequences of these lengths."""
    length = torch.tensor(lengths, dtype=torch.long)
    start, places, laid = length.cumsum(0) - length, torch.zeros(sum(lengths), dtype=torch.long), 0
    tokens, reals = [], []
    for bucket in _choose_buckets(lengths, waste):
        own = length[bucket, None]  # [size, 1]
        position = torch.arange(lengths[bucket[0]])  # [N]
        token, real = start[bucket, None] + torch.minimum(position, own - 1), position < own  # [size, N]
        places[token[real]] = laid + real.flatten().nonzero().flatten()
        laid += token.numel()
        tokens.append(token.to(device))
        reals.append(None if real.all() else real.to(device))
    in_order = laid == len(places) and bool((places == torch.arange(laid)).all())
    return _Layout(tokens, reals, None if in_order else places.to(device))


def _allowed_waste(mechanism: Mechanism) -> float:
    """Return the allowed ratio of padded to real area: WASTE, 1 (no padding) or inf (one batch)."""
    unpadded = "length" in mechanism.reads
    if not ("samples" in mechanism.reads or mechanism.chained):
        return 1.0 if unpadded else WASTE
    if unpadded:
        raise UnsupportedError(
            f"attention '{mechanism.config}' cannot be packed: it looks at the whole batch at once, and its result "
            "depends on the number of tokens, padding included; call it for one sequence at a time"
        )
    return math.inf


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
    """Return the self-attention within each of many sequences.

    >>> out = attention_packed(q, k, v, "quest", cu_seqlens=torch.tensor([0, 25, 40, 63], dtype=torch.int32))

    The result equals that of a loop over the sequences. On a GPU from Ampere on, a softmax over float16 or bfloat16
    without dropout goes through PyTorch's variable-length flash attention. Everything else runs in padded batches of
    sequences of similar length, whose padded area exceeds the real one by a quarter at most; elliptical scores and
    key-driven groupings, which look at the whole batch, in one.

    Args:
        q: queries [T, H, D].
        k: keys [T, G, D] and v: values [T, G, Dv].
        attention: a name, mapping or AttentionConfig without learnable parameters, or a Mechanism.
        cu_seqlens: where the sequences begin, int32 [B + 1]; a PackingPlan for several layers.
        is_causal: a query sees the keys up to its own position.
        dropout_p: dropout on the weights.

    Returns:
        [T, H, Dv].

    Raises:
        InputError: shapes, types or lengths that do not fit together.
        ConfigError: unknown name or option, or a mechanism with learnable parameters given by name.
        UnsupportedError: as in `Mechanism.forward`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise InputError(f"{name} has shape {list(x.shape)}; packed it needs three axes: tokens, heads, features")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]):
        raise InputError(
            f"q, k and v have (tokens, heads) {tuple(q.shape[:2])}, {tuple(k.shape[:2])} and {tuple(v.shape[:2])}; "
            "expected as many tokens, and as many heads of k as of v"
        )
    plan = cu_seqlens if isinstance(cu_seqlens, PackingPlan) else PackingPlan(cu_seqlens)
    mechanism = attention if isinstance(attention, Mechanism) else shared_mechanism(attention)
    fast = varlen_computes(mechanism, q.device, result_type(q), q.shape[-1], q.shape[1] != k.shape[1], dropout_p)
    if fast and mechanism.monitor is None and len(q) and q.shape[-1] == v.shape[-1]:
        return _varlen(q, k, v, mechanism, plan, is_causal)
    return _in_buckets(q, k, v, mechanism, plan, is_causal, dropout_p)


def _in_buckets(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, plan: PackingPlan, is_causal: bool, dropout_p: float
) -> Tensor:
    """Return the output [T, H, Dv] by padded batches."""
    if len(q) != sum(plan.lengths):
        raise InputError(f"q has {len(q)} tokens, but its sequences end at {sum(plan.lengths)}")
    if not len(q):
        return q.new_zeros(*q.shape[:2], v.shape[2]) + (q.sum() + k.sum() + v.sum())  # part of the graph
    layout, outs = plan.layout(_allowed_waste(mechanism), q.device), []
    moves = layout.places is not None or len(layout.tokens) > 1  # else one batch is the tokens as they lie
    for number, (tokens, real) in enumerate(zip(layout.tokens, layout.real, strict=True)):
        taken = [x.index_select(0, tokens.flatten()) if moves else x for x in (q, k, v)]
        batch = [x.unflatten(0, tokens.shape).transpose(1, 2) for x in taken]  # [size, H or G, N, D]
        mask = None if real is None else mechanism.padding_mask(real, same_tokens=True)
        piece = PIECE.set((number, real))
        try:
            out = mechanism(*batch, attn_mask=mask, is_causal=is_causal, dropout_p=dropout_p)
        finally:
            PIECE.reset(piece)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [size·N, H, Dv]
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if layout.places is None else out.index_select(0, layout.places)


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
    dtype = result_type(q)
    # Scores work on [B, H, N, D]: all tokens of all sequences are one batch row.
    q, k, row_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    q, k, scale = mechanism.score(q, k, row_v, mask=None, is_causal=is_causal)
    shared = q.shape[1] != k.shape[1]
    varlen_attn = _varlen_attn(shared)
    assert varlen_attn is not None  # varlen_computes says so
    out: Tensor = varlen_attn(
        *(_align(x.to(dtype)) for x in (q[0].transpose(0, 1), k[0].transpose(0, 1), v)),
        *[plan.cu_seqlens] * 2,
        *[plan.longest] * 2,
        scale=scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        **({"enable_gqa": True} if shared else {}),
    )
    return out


def _align(x: Tensor) -> Tensor:
    """Return x [T, H, D] of 2-byte numbers, copied unless every row begins at a multiple of 16 bytes."""
    steps = (x.stride(0), x.stride(1), x.storage_offset())
    return x if x.stride(2) == 1 and all(step % 8 == 0 for step in steps) else x.contiguous()
