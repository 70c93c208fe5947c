"""The averages behind aft-simple, aft-local and aft-full: exact for any finite input, never T×T.

Both operators work on ``[T, C]``, tokens by features of all heads and samples, in float32 or wider, and are opaque
to the compiler (``torch.library``), for what they do depends on the numbers they meet.

A sum Σ exp(a)·(x₁, x₂) is carried as a pair (m, s) that stands for exp(m)·s, where m is the running maximum of a:
two such pairs add exactly, whatever their sizes. Forwards a is the key and (x₁, x₂) = (value, 1); backwards a is
−(log normaliser) and (x₁, x₂) = (g, g·y).

Reference: :func:`quest_core.mechanisms.reference_aft.weighted_average`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# These sizes were chosen on a CPU; `python benchmarks/rules.py aft-tiles` times others.
KEY_BLOCK = 512  # keys and queries of a tile: [QUERY_BLOCK, KEY_BLOCK] biases are the most that exist at a time
QUERY_BLOCK = 256
MIN_KEY_BLOCK = 64  # for narrow windows
MAX_PRODUCTS = 32  # matrix products a tile may be cut into before element by element is cheaper
ELEMENTS = 1 << 22  # numbers in the largest temporary of the element by element path


def safe_range(dtype: torch.dtype) -> float:
    """How far exponents may spread in one product so that no term is lost, with room for values and gradients."""
    return 60.0 if dtype == torch.float32 else 600.0


def finite(top: Tensor) -> Tensor:
    """A maximum that may be subtracted: −inf, the maximum of nothing, becomes 0."""
    return top.masked_fill(top == -math.inf, 0)


def exact_arithmetic(device: torch.device) -> Any:
    """Autocast would run the products inside an operator in half precision."""
    return torch.autocast(device.type, enabled=False)


def _add(m: Tensor, s: Tensor, top: Tensor, sums: Tensor) -> None:
    """(m [..., C], s [..., 2, C]) += (top, sums), in place; `sums` is used up."""
    new = torch.maximum(m, top)
    base = finite(new)
    s.mul_((m - base).exp_().unsqueeze(-2))
    s.add_(sums.mul_((top - base).exp_().unsqueeze(-2)))
    m.copy_(new)


def _scan(m: Tensor, s: Tensor) -> None:
    """Inclusive prefix sums over the first axis, in place: m [T, C], s [T, 2, C].

    √T steps over all chunks at once, then √T over the chunks: every number is added twice.
    """
    length = m.shape[0]
    chunk = math.isqrt(max(length - 1, 0)) + 1
    for i in range(1, min(chunk, length)):
        n = m[i::chunk].shape[0]
        _add(m[i::chunk], s[i::chunk], m[i - 1 :: chunk][:n], s[i - 1 :: chunk][:n].clone())
    for start in range(chunk, length, chunk):
        stop = min(start + chunk, length)
        carried = s[start - 1].expand(stop - start, -1, -1).clone()
        _add(m[start:stop], s[start:stop], m[start - 1].clone(), carried)


def _suffixes(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Inclusive suffix sums over the first axis."""
    m, s = m.flip(0), s.flip(0)
    _scan(m, s)
    return m.flip(0), s.flip(0)


def _finish(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(average [T, C], log normaliser [T, C]); 0 and −inf where nothing was visible."""
    total = s[:, 1]
    seen = total > 0
    y = torch.where(seen, s[:, 0] / torch.where(seen, total, 1), 0)
    return y, torch.where(seen, m + total.log(), -math.inf)


def _pairs(a: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """One pair for each token: exp(a)·(first, second), nothing where a is −inf."""
    sums = torch.stack([first, second], dim=1)
    return a.clone(), sums.masked_fill_((a == -math.inf).unsqueeze(1), 0)


def _gradient_pairs(grad: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of the backward pass: exp(−lse)·(g, g·y); a query that saw nothing has no gradient."""
    return _pairs(torch.where(lse == -math.inf, -math.inf, -lse), grad, grad * y)


def _tall(x: Tensor, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows)]


# ---------------------------------------------------------------------------------------------------------------
# aft-simple, causal: y_t = Σ_{t' ≤ t} exp(k_t') v_t' / Σ_{t' ≤ t} exp(k_t')
# ---------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "quest::aft_running", mutates_args=(), schema="(Tensor k, Tensor v) -> (Tensor average, Tensor log_normaliser)"
)
def aft_running(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The running average of v weighted by exp(k), and its log normaliser: [T, C], [T, C] -> [T, C], [T, C].

    A key of −inf is invisible.
    """
    m, s = _pairs(k, v, torch.ones_like(v))
    _scan(m, s)
    return _finish(m, s)


@aft_running.register_fake
def _(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(k)


@torch.library.custom_op(
    "quest::aft_running_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor k, Tensor v, Tensor y, Tensor lse) -> (Tensor k, Tensor v)",
)
def aft_running_backward(grad: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    m, s = _suffixes(*_gradient_pairs(grad, y, lse))
    weight = (k + m).exp_()
    return weight * (v * s[:, 0] - s[:, 1]), weight * s[:, 0]


@aft_running_backward.register_fake
def _(grad: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(v)


def _running_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _running_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.quest.aft_running_backward(grad.contiguous(), *ctx.saved_tensors)
    return gradients


aft_running.register_autograd(_running_gradients, setup_context=_running_saves)


# ---------------------------------------------------------------------------------------------------------------
# aft-full and aft-local: y_t = Σ exp(k_t' + w_tt') v_t' / Σ exp(k_t' + w_tt')
# ---------------------------------------------------------------------------------------------------------------


class _Tiles:
    """The N×M biases, cut into tiles; a tile into products of exponentials none of which loses a term.

    A tile is one product exp(w − top) · exp(k − top') where its biases and its keys together spread over less than
    float can hold; where they spread further each is cut into bands of values, and every pair of bands is a product
    with maxima of its own. What spreads over too many bands is computed element by element.
    """

    def __init__(self, k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int) -> None:
        self.k, self.v, self.left, self.right, self.causal, self.window = k, v, left, right, causal, window
        self.n, self.m = left.shape[0], k.shape[0]
        self.offset = self.m - self.n if causal else 0  # position of the first query among the keys
        size = KEY_BLOCK
        if window:
            size = min(max(MIN_KEY_BLOCK, 1 << (window - 1).bit_length()), KEY_BLOCK)
        self.size = size
        self.blocks = _tall(k, size)
        self.limit = safe_range(k.dtype)
        self.tops = torch.stack([finite(k[keys].amax(0)) for keys in self.blocks])  # [blocks, C]
        lows = torch.stack([k[keys].masked_fill(k[keys] == -math.inf, math.inf).amin(0) for keys in self.blocks])
        spreads = (self.tops - lows).amax(1).clamp_(min=0)  # [blocks]
        reach = torch.full_like(spreads, math.inf)
        if right is not None:  # by Cauchy and Schwarz no bias of the block is further apart
            longest = torch.linalg.vector_norm(left, dim=1).amax() * 2
            norms = torch.linalg.vector_norm(right, dim=1)
            reach = torch.stack([norms[keys].amax() for keys in self.blocks]) * longest
        # One transfer for all blocks: each number read on its own would make a GPU wait.
        self.spreads, self.reach = torch.stack([spreads, reach]).tolist()
        self._kept: tuple[int, Tensor] | None = None

    def near(self, j: int) -> list[slice]:
        """The query rows that key block j meets with a bias."""
        first, last = 0, self.n
        start = self.blocks[j].start
        if self.window:
            first = start - self.window + 1 - self.offset
            last = start + self.size + self.window - 1 - self.offset
        if self.causal:
            first = max(first, start - self.offset)
        first, last = max(first, 0), min(last, self.n)
        return [slice(i, min(i + QUERY_BLOCK, last)) for i in range(first, last, QUERY_BLOCK)]

    def bias(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """w [rows, keys], and which of it is visible, None for all."""
        w = self.left[rows, keys] if self.right is None else self.left[rows] @ self.right[keys].T
        ahead_most = keys.stop - 1 - (rows.start + self.offset)
        behind_most = rows.stop - 1 + self.offset - keys.start
        hides = self.causal and ahead_most > 0
        if not hides and not (self.window and max(ahead_most, behind_most) >= self.window):
            return w, None
        query = torch.arange(rows.start, rows.stop, device=w.device)[:, None] + self.offset
        ahead = torch.arange(keys.start, keys.stop, device=w.device) - query  # [rows, keys]: t' − t
        if self.window:
            w = torch.where(ahead.abs() < self.window, w, 0)
        return w, ahead <= 0 if hides else None

    def products(
        self, j: int, w: Tensor, seen: Tensor | None
    ) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] | None:
        """Pairs of (top [rows, 1], exp(w − top) [rows, keys]) and (top' [C], exp(k − top')·(v, 1) [keys, 2C]).

        None where they would be too many.
        """
        spread, reach = self.spreads[j], self.reach[j]
        top = w.amax(1, keepdim=True)
        if not spread + reach <= self.limit:
            reach = (top - w.amin(1, keepdim=True)).amax().item()
        band = self.limit / 2
        whole = spread + reach <= self.limit
        if not whole and not (spread / band + 1) * (reach / band + 1) <= MAX_PRODUCTS:
            return None
        weights = list(_bands(w, top, 0 if whole else reach, band))
        if seen is not None:
            weights = [(top, e.mul_(seen)) for top, e in weights]
        keys = self._keys(j, 0 if whole else spread, band)
        return [(weight, key) for key in keys for weight in weights]

    def _keys(self, j: int, spread: float, band: float) -> list[tuple[Tensor, Tensor]]:
        block = self.blocks[j]
        if spread < band:
            if self._kept is None or self._kept[0] != j:
                x = (self.k[block] - self.tops[j]).exp_()
                self._kept = j, torch.cat([x * self.v[block], x], dim=1)
            return [(self.tops[j], self._kept[1])]
        pieces = _bands(self.k[block], self.tops[j], spread, band)
        return [(top, torch.cat([x * self.v[block], x], dim=1)) for top, x in pieces]

    def elements(self, rows: slice, j: int) -> Iterator[tuple[slice, slice]]:
        """Pieces of a tile (query rows, keys) small enough to be held feature by feature."""
        block, features = self.blocks[j], self.k.shape[1]
        step = max(1, min(block.stop - block.start, ELEMENTS // max(features, 1)))
        lines = max(1, ELEMENTS // max(step * features, 1))
        for i in range(rows.start, rows.stop, lines):
            for start in range(block.start, block.stop, step):
                yield slice(i, min(i + lines, rows.stop)), slice(start, min(start + step, block.stop))

    def far(self) -> tuple[Tensor, Tensor]:
        """For each query the sums over the key blocks it meets without a bias: [N, C] and [N, 2, C]."""
        m = self.tops.new_full((len(self.blocks) + 1, self.k.shape[1]), -math.inf)
        s = self.tops.new_zeros((len(self.blocks) + 1, 2, self.k.shape[1]))
        for j, block in enumerate(self.blocks):
            x = (self.k[block] - self.tops[j]).exp_()
            s[j, 0], s[j, 1] = (x * self.v[block]).sum(0), x.sum(0)
            m[j] = torch.where(s[j, 1] > 0, self.tops[j], -math.inf)
        query = torch.arange(self.n, device=m.device) + self.offset
        before = (query - self.window + 1).div(self.size, rounding_mode="floor").clamp(0, len(self.blocks))
        out_m, out_s = m.roll(1, 0), s.roll(1, 0)  # what the last row holds, nothing, comes first
        _scan(out_m, out_s)
        out_m, out_s = out_m[before], out_s[before]
        if not self.causal:
            after = (query + self.window + self.size - 1).div(self.size, rounding_mode="floor")
            after = after.clamp(0, len(self.blocks))
            m, s = _suffixes(m, s)
            _add(out_m, out_s, m[after], s[after])
        return out_m, out_s


def _bands(x: Tensor, top: Tensor, spread: float, band: float) -> Iterator[tuple[Tensor, Tensor]]:
    """(top − i·band, exp(x − that), zero outside the band) for every band of width `band` that x may reach."""
    count = int(spread // band) + 1
    for i in range(count):
        upper = top - band * i
        e = (x - upper).exp_()
        if count > 1:
            lower = top - band * (i + 1) if i + 1 < count else -math.inf
            e.masked_fill_(~((x <= upper) & (x > lower)), 0)
        yield upper, e


@torch.library.custom_op(
    "quest::aft_biased",
    mutates_args=(),
    schema="(Tensor k, Tensor v, Tensor left, Tensor? right, bool causal, int window) "
    "-> (Tensor average, Tensor log_normaliser)",
)
def aft_biased(
    k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """The average of v weighted by exp(k_t' + w_tt') for each query position and feature, and its log normaliser.

    Args:
        k: [M, C]; a key of −inf is invisible.
        v: [M, C].
        left: [N, r] and right: [M, r], with w = left rightᵀ; or left: [N, M], w itself, and no right.
        causal: query i sees keys j ≤ i + M − N; M must not be smaller than N.
        window: w counts where the distance of the positions is smaller than this, and is 0 elsewhere; 0: everywhere.

    Returns:
        [N, C], zero where nothing is visible, and [N, C], −inf there.
    """
    with exact_arithmetic(k.device):
        tiles = _Tiles(k, v, left, right, causal, window)
        if window:
            m, s = tiles.far()
        else:
            m = k.new_full((tiles.n, k.shape[1]), -math.inf)
            s = k.new_zeros((tiles.n, 2, k.shape[1]))
        for j, keys in enumerate(tiles.blocks):
            for rows in tiles.near(j):
                w, seen = tiles.bias(rows, keys)
                products = tiles.products(j, w, seen)
                if products is None:
                    for some, few in tiles.elements(rows, j):
                        _add(m[some], s[some], *_element_sums(tiles, some, few))
                    continue
                for (top, e), (key_top, x) in products:
                    sums = (e @ x).unflatten(1, (2, -1))  # [rows, 2, C]
                    total = sums[:, 1].clone()
                    # Over its own total, for a product's maximum may lie far above what a row sees of it.
                    sums.div_(torch.where(total > 0, total, 1).unsqueeze(1))
                    _add(m[rows], s[rows], top + key_top + total.log_(), sums)
        return _finish(m, s)


def _element_logits(tiles: _Tiles, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """[rows, keys, C], −inf where invisible, and w [rows, keys]."""
    w, seen = tiles.bias(rows, keys)
    hidden = w if seen is None else w.masked_fill(~seen, -math.inf)
    return hidden.unsqueeze(2) + tiles.k[keys], w


def _element_sums(tiles: _Tiles, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    logits, _ = _element_logits(tiles, rows, keys)
    top = logits.amax(1)
    e = logits.sub_(finite(top).unsqueeze(1)).exp_()
    total = e.sum(1)
    return top, torch.stack([e.mul_(tiles.v[keys]).sum(1), total], dim=1)


@aft_biased.register_fake
def _(k: Tensor, v: Tensor, left: Tensor, right: Tensor | None, causal: bool, window: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(left.shape[0], k.shape[1]), k.new_empty(left.shape[0], k.shape[1])


@torch.library.custom_op(
    "quest::aft_biased_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor k, Tensor v, Tensor left, Tensor? right, Tensor y, Tensor lse, bool causal, "
    "int window) -> (Tensor k, Tensor v, Tensor left, Tensor right)",
)
def aft_biased_backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `aft_biased`, tile by tile from the log normaliser; that of `right` is empty where there is none.

    With p_tt' = exp(k_t' + w_tt' − lse_t): dv_t' = Σ_t p g_t, dk_t' = Σ_t p g_t (v_t' − y_t) and
    dw_tt' = Σ_features p g_t (v_t' − y_t).
    """
    with exact_arithmetic(k.device):
        tiles = _Tiles(k, v, left, right, causal, window)
        features = k.shape[1]
        d_k, d_v, d_left = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(left)
        d_right = k.new_zeros(0) if right is None else torch.zeros_like(right)
        lse = torch.where(lse == -math.inf, math.inf, lse)  # nothing seen, no weight
        ceiling = tiles.limit + 4  # reached only where a product holds nothing visible: there e or x is zero
        far = _FarGradients(tiles, grad, y, lse) if window else None
        for j, keys in enumerate(tiles.blocks):
            near = tiles.near(j)
            if far is not None:
                far.add(j, near, d_k[keys], d_v[keys])
            for rows in near:
                w, seen = tiles.bias(rows, keys)
                d_w = torch.zeros_like(w)
                products = tiles.products(j, w, seen)
                if products is None:
                    for some, few in tiles.elements(rows, j):
                        logits, _ = _element_logits(tiles, some, few)
                        p = logits.sub_(lse[some].unsqueeze(1)).exp_().mul_(grad[some].unsqueeze(1))
                        d_v[few] += p.sum(0)
                        p.mul_(v[few] - y[some].unsqueeze(1))
                        d_k[few] += p.sum(0)
                        part = slice(some.start - rows.start, some.stop - rows.start)
                        d_w[part, few.start - keys.start : few.stop - keys.start] = p.sum(2)
                for (top, e), (key_top, x) in products or ():
                    scaled = (top + key_top - lse[rows]).clamp_(max=ceiling).exp_().mul_(grad[rows])
                    both = torch.cat([scaled, -scaled * y[rows]], dim=1)  # [rows, 2C]
                    back = e.T @ both  # [keys, 2C]
                    d_v[keys].addcmul_(x[:, features:], back[:, :features])
                    d_k[keys].addcmul_(x[:, :features], back[:, :features])
                    d_k[keys].addcmul_(x[:, features:], back[:, features:])
                    d_w.addcmul_(e, both @ x.T)
                if window:
                    query = torch.arange(rows.start, rows.stop, device=k.device)[:, None] + tiles.offset
                    distance = torch.arange(keys.start, keys.stop, device=k.device) - query
                    d_w.masked_fill_(distance.abs() >= window, 0)
                if right is None:
                    d_left[rows, keys] = d_w
                else:
                    d_left[rows].addmm_(d_w, right[keys])
                    d_right[keys].addmm_(d_w.T, left[rows])
        return d_k, d_v, d_left, d_right


class _FarGradients:
    """What keys receive from the queries that meet them without a bias, by sums over the queries before and after."""

    def __init__(self, tiles: _Tiles, grad: Tensor, y: Tensor, lse: Tensor) -> None:
        self.tiles = tiles
        m, s = _pairs(-lse, grad, grad * y)
        self.after = _suffixes(m, s)
        if not tiles.causal:
            _scan(m, s)
            self.before = m, s

    def add(self, j: int, near: list[slice], d_k: Tensor, d_v: Tensor) -> None:
        """Add the gradients of key block j to [keys, C] each."""
        tiles, keys = self.tiles, self.tiles.blocks[j]
        # A block near no query (queries fewer than keys) lies before all of them.
        first, last = (near[0].start, near[-1].stop) if near else (0, 0)
        found = []
        if last < tiles.n:
            found.append((self.after[0][last], self.after[1][last]))
        if first > 0 and not tiles.causal:
            found.append((self.before[0][first - 1], self.before[1][first - 1]))
        for m, s in found:
            weight = (tiles.k[keys] + m).exp_()
            d_v.addcmul_(weight, s[0])
            d_k.add_(weight * (tiles.v[keys] * s[0] - s[1]))


@aft_biased_backward.register_fake
def _(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_right = k.new_empty(0) if right is None else torch.empty_like(right)
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(left), d_right


def _biased_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k, v, left, right, ctx.causal, ctx.window = inputs
    ctx.has_right = right is not None
    ctx.save_for_backward(k, v, left, *([right] if ctx.has_right else []), *output)


def _biased_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    k, v, left, *right, y, lse = ctx.saved_tensors
    d_k, d_v, d_left, d_right = torch.ops.quest.aft_biased_backward(
        grad.contiguous(), k, v, left, right[0] if right else None, y, lse, ctx.causal, ctx.window
    )
    return d_k, d_v, d_left, d_right if right else None, None, None


aft_biased.register_autograd(_biased_gradients, setup_context=_biased_saves)
