"""aft-conv: biases by relative position on a grid, one set a head, one key feature a head. [A] equations 6, 8, 9, 10.

Few tokens take the plain formula, a softmax of keys and biases over all tokens. Many take the paper's depth-wise
convolution with exp(w) − 1 and a global sum; where that would cancel or underflow, the plain formula in blocks.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import is_exporting, is_exporting_to_onnx, is_tracing, no_autocast, refuse_to_count_keys
from ..errors import ConfigError, InputError, UnsupportedError
from ..ops import block_rows, local, recompute, widen
from ..registry import Option, register
from .aft import QUERY, AttentionFree
from .aft_ops import finite, safe_range
from .base import Dims

TAU = 0.5  # temperature of the Gumbel softmax, [A] section 8
CANCELLATION = 16  # how many times smaller than its parts a difference may be: 4 of the 24 bits of float32


def _places(grid: list[int], prefix: int, size: int, device: torch.device) -> Tensor:
    """Return the place of each token on the grid, [T, dims]."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    place = torch.stack([axis.flatten() for axis in axes], dim=1)  # [T − prefix, dims]
    # Prefix tokens lie so far outside the grid, and from each other, that no window reaches them.
    outside = torch.arange(1, prefix + 1, device=device)[:, None] * -(size + sum(grid))
    return torch.cat([outside.expand(-1, len(grid)), place])


def _bins(here: Tensor, place: Tensor, size: int) -> Tensor:
    """Return the index [N, T] of the bias of tokens at `place` [T, dims] for queries `here` [N, dims].

    size^dims stands for a bias of 0.
    """
    offset = place - here[:, None] + size // 2  # [N, T, dims]
    inside = ((offset >= 0) & (offset < size)).all(2)
    bins = offset[..., 0]
    for axis in range(1, place.shape[1]):
        bins = bins * size + offset[..., axis]
    # A token is its own neighbor at the center; a prefix token has no bias even to itself.
    return torch.where(inside & (here[:, :1] >= 0), bins, size ** place.shape[1])


def _average(k: Tensor, v: Tensor, table: Tensor, bins: Tensor) -> Tensor:
    """Return the average [B, h, N, D] of v [B, h, T, D] with weights exp(k + w), k [B, h, T]; 0 without keys.

    w is the bias of `table` [h, s^dims + 1] at the indices `bins` [N, T].
    """
    w = table.index_select(1, bins.flatten()).unflatten(1, bins.shape)  # [h, N, T]
    logits = k.unsqueeze(2) + w  # [B, h, N, T]
    e = (logits - finite(logits.detach().amax(3, keepdim=True))).exp()
    total = e.sum(3, keepdim=True)
    average: Tensor = e @ v / torch.where(total > 0, total, 1)
    return average


def _convolve(k: Tensor, v: Tensor, w: Tensor, grid: list[int], prefix: int) -> Tensor | None:
    """Return `_average` of all queries by a convolution with exp(w) − 1 and a global sum, as equation 6 writes it.

    k [B, h, T], v [B, h, T, D], w [h, s, ...] -> [B, h, T, D], or None where more than a few bits would cancel.
    """
    if w.detach().abs().amax() > safe_range(k.dtype) / 2:
        return None
    if k.is_cuda and w.shape[0] == 1 and torch.backends.cudnn.allow_tf32:
        return None  # cuDNN would round to 10 bits; depth-wise convolutions of several heads are PyTorch's own
    x = (k - finite(k.detach().amax(2, keepdim=True))).exp().unsqueeze(3)
    x = torch.cat([x * v, x], 3)  # [B, h, T, D + 1]: numerator and denominator of each key
    total = x.sum(2, keepdim=True)
    placed = x[:, :, prefix:].permute(0, 3, 1, 2).reshape(-1, w.shape[0], *grid)  # [B·(D + 1), h, *grid]
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(grid) - 1]
    near = convolution(placed, w.expm1().unsqueeze(1), padding=w.shape[1] // 2, groups=w.shape[0])
    near = near.reshape(k.shape[0], -1, *near.shape[1:]).flatten(3).permute(0, 2, 3, 1)  # [B, h, T − prefix, D + 1]
    sums = total + F.pad(near, (0, 0, prefix, 0))
    weight = sums[..., -1:]
    if (weight * CANCELLATION < total[..., -1:]).any():
        return None
    return sums[..., :-1] / torch.where(weight > 0, weight, 1)


@register(
    "aft-conv",
    source="[A] eq. 6, 8, 9, 10",
    options=(
        Option("window", int, 11, "positions s of the bias along each axis, odd; the paper's models use 11", 1),
        Option("dims", int, 2, "axes of the grid: 1, 2 or 3", 1),
        Option("grid", str, None, "its extents, '14x14' or '*x14'; null: a line, square or cube", nullable=True),
        Option("prefix", int, 0, "leading tokens off the grid (class token, registers), without a bias", 0),
        Option("gumbel", bool, False, "one position a head: Gumbel softmax while training, hard in evaluation"),
        QUERY,
    ),
)
class AttentionFreeConv(AttentionFree):
    """σ(Q) ⊙ (conv(exp(K) V, exp(w) − 1) + Σ exp(K) V) / (conv(exp(K), exp(w) − 1) + Σ exp(K)).

    w is one bias per head and relative position on a 1d, 2d or 3d grid.
    """

    learnable = reshapes = on_grid = True
    causal_reason = "its convolution looks both ways along every axis of the grid"
    reads = ("tokens", "order", "length", "random")
    key_features = 1
    complexity = "O(T·s^dims·d) time on large grids, O(T·d) memory; O(T²·d) and O(T²) under torch.compile"

    def __init__(  # not `dims`, which is an option
        self, sizes: Dims, /, *, window: int, dims: int, grid: str | None, prefix: int, gumbel: bool, query: bool
    ) -> None:
        super().__init__(sizes, query=query)
        if window % 2 == 0:
            raise ConfigError(
                f"attention 'aft-conv': window is {window}; it needs a center, so choose an odd number such as "
                f"{window - 1} or {window + 1}"
            )
        if dims > 3:
            raise ConfigError(f"attention 'aft-conv': dims is {dims}; a grid has 1, 2 or 3 axes")
        self.prefix, self.gumbel = prefix, gumbel
        self.axes = dims
        # The extent of each axis. One of None follows from the number of tokens; without any, the grid is a line, a
        # square or a cube. A host may assign it before a forward whose crop has another shape.
        self.grid = _read_grid(grid, dims)
        # [h, s, ...], the raw biases; their mean and scale cancel (equation 8).
        self.weight = nn.Parameter(torch.randn(sizes.num_heads, *[window] * dims))
        # 0 at the start: as aft-simple with one key a head.
        self.gain = nn.Parameter(torch.zeros(sizes.num_heads))  # γ [h]
        self.shift = nn.Parameter(torch.zeros(sizes.num_heads))  # β [h]

    def bias(self) -> Tensor:
        """Return w = γ (w − mean) / std + β, [h, s, ...], equation 8; each head over its own positions."""
        weight, gain, shift = widen(local(self.weight)), widen(local(self.gain)), widen(local(self.shift))
        raw = weight.flatten(1)  # [h, positions]
        centered = raw - raw.mean(1, keepdim=True)
        variance = centered.square().mean(1, keepdim=True)
        varies = variance > 0
        scaled = centered * torch.where(varies, torch.where(varies, variance, 1).rsqrt(), 0)
        return torch.addcmul(shift[:, None], gain[:, None], scaled).view(weight.shape)

    def entropy(self) -> Tensor:
        """Return Σ over heads of the entropy of softmax(w), in nats: the sparsity regularizer of equation 9."""
        log_p = F.log_softmax(self.bias().flatten(1), 1)  # [h, positions]
        return -(log_p.exp() * log_p).sum()

    def _positions(self) -> Tensor:
        """Return the biases to use: all, or by equation 10 one position a head, sampled softly while training."""
        w = self.bias()
        if not self.gumbel:
            return w
        flat = w.flatten(1)
        if self.training:
            # An exponential sample of exactly zero would give an infinite logit.
            noise = -torch.empty_like(flat).exponential_().clamp_min(torch.finfo(flat.dtype).tiny).log()
            chosen = ((flat + noise) / TAU).softmax(1)
        else:
            position = torch.arange(flat.shape[1], device=flat.device)  # one_hot reads its input
            chosen = (position == flat.argmax(1, keepdim=True)).to(flat.dtype)
        return (flat * chosen).view(w.shape)

    def check_lengths(self, n: int, m: int, is_causal: bool) -> None:
        if n != m:
            raise UnsupportedError(
                f"attention 'aft-conv' needs queries and keys on one grid, not {n} queries and {m} keys; use "
                "'aft-simple' or 'aft-full' to attend across"
            )
        self._extents(m - self.prefix)

    def average(self, n: int, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        keys, grid = keys.squeeze(3), self._extents(n - self.prefix)  # [B, H, T]
        w = self._positions().to(keys.dtype)
        place = _places(grid, self.prefix, w.shape[1], w.device)  # [T, dims]
        table = F.pad(w.flatten(1), (0, 1))  # [H, s^dims + 1]
        step = block_rows(n, keys.numel())

        def rows(here: Tensor) -> Tensor:
            return _average(keys, values, table, _bins(here, place, w.shape[1]))

        with no_autocast(w.device.type):
            if step is None:
                return rows(place)
            if (found := _convolve(keys, values, w, grid, self.prefix)) is not None:
                return found
            return torch.cat([recompute(rows, here) for here in place.split(step)], 2)

    def reference_bias(self, n: int, m: int, is_causal: bool) -> Tensor:
        flat = self.weight.flatten(1)
        centered = flat - flat.mean(1, keepdim=True)
        deviation = centered.square().mean(1, keepdim=True)
        varies = deviation > 0
        scaled = torch.where(varies, centered / torch.where(varies, deviation, 1).sqrt(), 0)
        w = self.gain[:, None] * scaled + self.shift[:, None]  # [h, positions], equation 8
        if self.gumbel:  # in evaluation: one position per head
            w = w * F.one_hot(w.argmax(1), w.shape[1])
        return torch.cat([w, w.new_zeros(w.shape[0], 1)], 1)[:, self._reference_bins(n)]  # [h, T, T]

    def _reference_bins(self, tokens: int) -> Tensor:
        """Return the index [T, T] of the position that key t' has relative to query t; s^dims outside the window."""
        size = self.weight.shape[1]
        places = list(itertools.product(*map(range, self._extents(tokens - self.prefix))))
        bins = torch.full((tokens, tokens), self.weight[0].numel())  # also for prefix tokens
        for (t, here), (other, there) in itertools.product(enumerate(places, self.prefix), repeat=2):
            offset = [b - a + size // 2 for a, b in zip(here, there, strict=True)]
            if all(0 <= o < size for o in offset):
                bins[t, other] = sum(o * size**axis for axis, o in enumerate(reversed(offset)))
        return bins

    def _extents(self, count: int) -> list[int]:
        """Return the extents of the grid that `count` tokens fill."""
        if is_exporting():
            refuse_to_count_keys("aft-conv")
            dynamic = isinstance(count, torch.SymInt) or is_exporting_to_onnx()  # which may fix a dynamic length
            if dynamic and self.grid is None and self.axes > 1:
                raise UnsupportedError(
                    "attention 'aft-conv' does not support torch.export with a dynamic length: the square or cube is "
                    "inferred from the number of tokens; set grid, such as grid='*x14', or dims=1, or export one length"
                )
            count = int(count) if is_tracing() else count
        if self.axes == 1 and self.grid is None:
            wanted = [count]
        elif self.grid is None:
            power = self.axes
            if is_exporting():  # for one length
                side = next(i for i in range(max(count, 0) + 1) if i**power >= count)
            else:
                side = round(max(count, 0) ** (1 / power))
            wanted = [side] * power
        else:
            fixed = math.prod(extent for extent in self.grid if extent is not None)
            wanted = [count // fixed if extent is None else extent for extent in self.grid]
        if count < 1 or math.prod(wanted) != count:
            shape = "x".join("*" if extent is None else str(extent) for extent in self.grid or ())
            what = f"the grid {shape}" if shape else {1: "a line", 2: "a square", 3: "a cube"}[self.axes]
            raise InputError(
                f"attention 'aft-conv': {count + self.prefix} tokens less {self.prefix} prefix tokens are {count}, "
                f"which do not fill {what}; say grid='*x14' (14 wide, any height), prefix=1 for a class token, dims=1 "
                "for a sequence, or assign the family's `grid` before the call"
            )
        return wanted


def _read_grid(text: str | None, axes: int) -> tuple[int | None, ...] | None:
    """Return the extents of '14x14', (14, 14), or of '*x14', (None, 14)."""
    if text is None:
        return None
    pieces = text.split("x")
    good = all(piece == "*" or (piece.isdecimal() and int(piece) > 0) for piece in pieces)
    if not good or len(pieces) != axes or pieces.count("*") > 1:
        example = {1: "196", 2: "14x14' or '*x14", 3: "8x14x14' or '*x14x14"}[axes]
        raise ConfigError(
            f"attention 'aft-conv': grid is {text!r}; with dims={axes} write '{example}', at most one extent as *"
        )
    return tuple(None if piece == "*" else int(piece) for piece in pieces)


def position_entropy(model: nn.Module) -> Tensor | float:
    """Return equation 9 summed over all aft-conv of a model, 0 without any: the paper's loss has 0.001 of it."""
    return sum((part.entropy() for part in model.modules() if isinstance(part, AttentionFreeConv)), 0.0)
