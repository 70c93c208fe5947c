"""The averages behind aft-simple, aft-local and aft-full: exact for any finite input, never T×T.

One operator on ``[T, C]``, tokens by features of all heads and samples, in float32 or wider. It is opaque to the
compiler because its path depends on the numbers: a block of queries is one matrix product exp(w) · exp(k)·(v, 1) where
its exponents lie close enough together for float32, or else for float64; exponents further apart are summed feature by
feature. The keys that a block meets without a bias enter as one token: a pair (m, s) stands for exp(m)·s, as a key k
with its value v is the pair (k, (v, 1)).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import no_autocast
from ..errors import UnsupportedError

ROWS = 256  # queries of a block, which bound memory: [ROWS, M] biases at a time
NARROW = 64  # the least where the window is narrower
ELEMENTS = 2**22  # numbers in the largest temporary, unless one query's keys are more


def safe_range(dtype: torch.dtype) -> float:
    """Return how far exponents may spread in one product with no term lost, with room for values and gradients."""
    return 60.0 if dtype == torch.float32 else 600.0


def finite(top: Tensor) -> Tensor:
    """Return a maximum that may be subtracted: −inf, the maximum of nothing, becomes 0."""
    return top.masked_fill(top == -math.inf, 0)


class _Block:
    """Some queries and the pairs (m [K, C], s [K, 2, C]) that they meet; biases w and what is hidden are [rows, K]."""

    def __init__(self, m: Tensor, s: Tensor, w: Tensor, hidden: Tensor | None, seen_by_all: int) -> None:
        self.m, self.s, self.w, self.hidden = m, s, w, hidden
        self.top, self.top_w = finite(m.amax(0)), w.amax(1, keepdim=True)  # [C], [rows, 1]
        spread = (self.top_w - w.amin(1, keepdim=True)).amax()
        if hidden is not None:
            # A query may not see the block's largest key; at least it sees the largest that all of its queries see.
            least = m.masked_fill(m == -math.inf, math.inf).amin(0)
            spread = spread + (self.top - torch.maximum(m[:seen_by_all].amax(0), least)).amax().clamp_(min=0)
        self.dtype: torch.dtype | None = None  # of the products; None: feature by feature
        far = spread.item()
        if far <= safe_range(m.dtype):
            self.dtype = m.dtype
        elif far <= safe_range(torch.float64) and m.device.type != "mps":
            self.dtype = torch.float64

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return exp(w − top) [rows, K] and exp(m − top) [K, 1, C]."""
        e = (self.w.to(self.dtype) - self.top_w).exp_()
        if self.hidden is not None:
            e.masked_fill_(self.hidden, 0)
        return e, (self.m.to(self.dtype) - self.top).exp_().unsqueeze(1)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, logits [queries, K, C]), few enough to be held feature by feature."""
        w = self.w if self.hidden is None else self.w.masked_fill(self.hidden, -math.inf)
        step = max(1, ELEMENTS // self.m.numel())
        for start in range(0, w.shape[0], step):
            rows = slice(start, min(start + step, w.shape[0]))
            yield rows, w[rows].unsqueeze(2) + self.m

    def average(self) -> tuple[Tensor, Tensor]:
        """Return (average, log normalizer), [rows, C] each; 0 and −inf where nothing is visible."""
        if self.dtype is not None:
            e, x = self.factors()
            sums = (e @ (x * self.s).flatten(1)).unflatten(1, (2, -1))  # [rows, 2, C]
            return _finish(sums[:, 0], sums[:, 1], self.top_w + self.top)
        found = []
        for _, logits in self.pieces():
            top = finite(logits.amax(1))
            e = logits.sub_(top.unsqueeze(1)).exp_()
            found.append(_finish((e * self.s[:, 0]).sum(1), (e * self.s[:, 1]).sum(1), top))
        y, lse = zip(*found, strict=True)
        return torch.cat(y), torch.cat(lse)

    def gradients(self, grad: Tensor, along: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of s [K, 2, C] and w [rows, K]; that of m is Σ s·ds.

        Arguments as in `aft_biased_backward`, [rows, C].
        """
        if self.dtype is not None:
            e, x = self.factors()
            both = torch.stack([grad, -along], 1) * (self.top_w + self.top - lse).to(self.dtype).exp_().unsqueeze(1)
            both = both.flatten(1)  # [rows, 2C]
            d_s = (e.T @ both).unflatten(1, (2, -1)) * x
            return d_s.to(self.s.dtype), e.mul_(both @ (x * self.s).flatten(1).T).to(self.s.dtype)
        d_s, d_w = torch.zeros_like(self.s), torch.zeros_like(self.w)
        for rows, logits in self.pieces():
            p = logits.sub_(lse[rows].unsqueeze(1)).exp_()
            by_value, by_weight = p * grad[rows].unsqueeze(1), p * -along[rows].unsqueeze(1)
            d_s[:, 0] += by_value.sum(0)
            d_s[:, 1] += by_weight.sum(0)
            d_w[rows] = by_value.mul_(self.s[:, 0]).add_(by_weight.mul_(self.s[:, 1])).sum(2)
        return d_s, d_w


def _finish(numerator: Tensor, total: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return (average, log normalizer) of sums that are relative to exp(top)."""
    seen = total > 0
    y = torch.where(seen, numerator / torch.where(seen, total, 1), 0)
    return y.to(top.dtype), torch.where(seen, top + total.log(), -math.inf).to(top.dtype)


class _Blocks:
    """The N×M biases in blocks of queries. With 200 tokens and a window of 32 the second of them has

    - queries 64 to 127 (`rows`),
    - keys 33 to 158 (`near`), those within the window of some query,
    - one pair for keys 0 to 32, from the running sum of `before`, and one for 159 to 199, from `after`, unless causal.
    """

    def __init__(self, k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int) -> None:
        self.k, self.left, self.right, self.causal, self.window = k, left, right, causal, window
        self.s = torch.stack([v, torch.ones_like(v)], 1)  # [M, 2, C]
        n, m = left.shape[0], k.shape[0]
        self.offset = m - n if causal else 0  # position of the first query among the keys
        step = max(1, min(ROWS, max(NARROW, window or ROWS), ELEMENTS // m))
        self.rows = [slice(start, min(start + step, n)) for start in range(0, n, step)]
        reach = window - 1 if window else max(n, m)  # how far from a query keys with a bias lie
        self.near = [
            slice(max(rows.start + self.offset - reach, 0), min(rows.stop + self.offset + (0 if causal else reach), m))
            for rows in self.rows
        ]
        self.before: list[slice] = []  # for each block the keys before `near` that the previous block does not have
        self.after: list[slice] = []  # the same after `near`, last block first
        if window:
            starts, stops = [near.start for near in self.near], [near.stop for near in self.near]
            self.before = [slice(*ends) for ends in zip([0, *starts], starts, strict=False)]
            if not causal:
                self.after = [slice(*ends) for ends in zip(stops[::-1], [m, *stops[::-1]], strict=False)]

    def running_sums(self, pieces: list[slice]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sums of pieces up to each, as pairs: m [1, C] and s [1, 2, C]."""
        top, total = self.k.new_full((1, self.k.shape[1]), -math.inf), torch.zeros_like(self.s[:1])
        tops, totals = [], []
        for piece in pieces:
            if piece.start < piece.stop:
                new = torch.maximum(top, self.k[piece].amax(0, keepdim=True))
                base = finite(new)
                x = (self.k[piece] - base).exp_().unsqueeze(1) * self.s[piece]
                total = total * (top - base).exp_().unsqueeze(1) + x.sum(0, keepdim=True)
                top = new
            tops.append(top)
            totals.append(total)
        return tops, totals

    def __iter__(self) -> Iterator[tuple[slice, slice, _Block]]:
        """Yield (queries, keys met with a bias, the block)."""
        before = list(zip(*self.running_sums(self.before), strict=True))
        after = list(zip(*self.running_sums(self.after), strict=True))[::-1]
        for i, (rows, near) in enumerate(zip(self.rows, self.near, strict=True)):
            pairs = [*before[i : i + 1], (self.k[near], self.s[near]), *after[i : i + 1]]
            m, s = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*pairs, strict=True))
            w = self.left[rows, near] if self.right is None else self.left[rows] @ self.right[near].T
            ahead = self.ahead(rows, near)
            if self.window:
                w = F.pad(w.masked_fill(ahead.abs() >= self.window, 0), (1, len(after) > 0))
            hidden = F.pad(ahead > 0, (1 if self.window else 0, 0)) if self.causal else None
            seen_by_all = bool(self.window) + rows.start + self.offset + 1 - near.start  # up to the first query's key
            yield rows, near, _Block(m, s, w, hidden, seen_by_all)

    def ahead(self, rows: slice, keys: slice) -> Tensor:
        """Return t' − t, [rows, keys]."""
        query = torch.arange(rows.start, rows.stop, device=self.k.device)[:, None] + self.offset
        return torch.arange(keys.start, keys.stop, device=self.k.device) - query

    def add_of_sums(self, pieces: list[slice], grads: list[Tensor], d_k: Tensor, d_v: Tensor) -> None:
        """Add to the gradients d_k and d_v what follows from `grads` [1, 2, C] of each of the `running_sums`."""
        tops, _ = self.running_sums(pieces)
        total, last = torch.zeros_like(self.s[:1]), None
        for piece, top, grad in reversed(list(zip(pieces, tops, grads, strict=True))):
            total = grad if last is None else grad + total * (top - last).exp_().unsqueeze(1)
            last = finite(top)
            self.add(piece, total * (self.k[piece] - last).exp_().unsqueeze(1), d_k, d_v)

    def add(self, keys: slice, d_s: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        """Add to the gradients d_k and d_v what follows from d_s [keys, 2, C] of the keys' pairs."""
        d_v[keys] += d_s[:, 0]
        d_k[keys] += (d_s * self.s[keys]).sum(1)


@torch.library.custom_op(
    "quest::aft_biased",
    mutates_args=(),
    schema="(Tensor k, Tensor v, Tensor left, Tensor? right, bool causal, int window) "
    "-> (Tensor average, Tensor log_normalizer)",
)
def aft_biased(
    k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """Return the average of v weighted by exp(k_t' + w_tt') for each query and feature, and its log normalizer.

    Args:
        k: [M, C]; a key of −inf is invisible. M is at least 1.
        v: [M, C].
        left: [N, r] and right: [M, r], with w = left rightᵀ; or left: [N, M], w itself, and no right.
        causal: query i sees keys j ≤ i + M − N; M must not be smaller than N.
        window: w counts where the distance of the positions is smaller than this, and is 0 elsewhere; 0: everywhere.

    Returns:
        [N, C], zero where nothing is visible, and [N, C], −inf there.
    """
    with no_autocast(k.device.type):
        found = [block.average() for _, _, block in _Blocks(k, v, left, right, causal, window)]
        y, lse = zip(*found, strict=True)
        return torch.cat(y), torch.cat(lse)


def _fake_biased(k: Tensor, v: Tensor, left: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(left.shape[0], k.shape[1]), k.new_empty(left.shape[0], k.shape[1])


@torch.library.custom_op(
    "quest::aft_biased_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor along, Tensor k, Tensor v, Tensor left, Tensor? right, Tensor lse, bool causal, "
    "int window) -> (Tensor k, Tensor v, Tensor left, Tensor right)",
)
def aft_biased_backward(
    grad: Tensor,
    along: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    lse: Tensor,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `aft_biased`; that of `right` is empty if it is None.

    With p_tt' = exp(k_t' + w_tt' − lse_t): dv_t' = Σ_t p g_t, dk_t' = Σ_t p (g_t v_t' − a_t) and
    dw_tt' = Σ_features p (g_t v_t' − a_t).

    Args:
        grad: g, of the average [N, C].
        along: a = g·y less the gradient of the log normalizer [N, C].
    """
    with no_autocast(k.device.type):
        blocks = _Blocks(k, v, left, right, causal, window)
        d_k, d_v, d_left = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(left)
        d_right = k.new_zeros(0) if right is None else torch.zeros_like(right)
        lse = torch.where(lse == -math.inf, math.inf, lse)  # nothing seen, no weight
        d_before, d_after = [], []
        for rows, near, block in blocks:
            d_s, d_w = block.gradients(grad[rows], along[rows], lse[rows])
            if window:
                d_before.append(d_s[:1])
                d_after.append(d_s[-1:])
                d_s, d_w = (x.narrow(axis, 1, near.stop - near.start) for axis, x in enumerate((d_s, d_w)))
                d_w = d_w.masked_fill(blocks.ahead(rows, near).abs() >= window, 0)
            blocks.add(near, d_s, d_k, d_v)
            if right is None:
                d_left[rows, near] = d_w
            else:
                d_left[rows].addmm_(d_w, right[near])
                d_right[near].addmm_(d_w.T, left[rows])
        if window:
            blocks.add_of_sums(blocks.before, d_before, d_k, d_v)
        if blocks.after:
            blocks.add_of_sums(blocks.after, d_after[::-1], d_k, d_v)
        return d_k, d_v, d_left, d_right


def _fake_gradients(
    grad: Tensor, along: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_right = k.new_empty(0) if right is None else torch.empty_like(right)
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(left), d_right


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, v, left, right, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(k, v, left, right, *output)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    k, v, left, right, y, lse = ctx.saved_tensors
    d_k, d_v, d_left, d_right = aft_biased_backward(
        grad, grad * y - grad_lse, k, v, left, right, lse, ctx.causal, ctx.window
    )
    return d_k, d_v, d_left, None if right is None else d_right, None, None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    left, window = inputs[4], inputs[8]
    ctx.name = "aft-simple" if not left.shape[1] else "aft-local" if window else "aft-full"


def _second(ctx: Any, *_: Any) -> Any:
    raise UnsupportedError(
        f"attention '{ctx.name}' does not support double backward (create_graph=True): its gradient is one operator; "
        "use attention 'linear', which can be differentiated any number of times"
    )


aft_biased.register_fake(_fake_biased)
aft_biased.register_autograd(_gradients, setup_context=_setup)
aft_biased_backward.register_fake(_fake_gradients)
aft_biased_backward.register_autograd(_second, setup_context=_setup_backward)
