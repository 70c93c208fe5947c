"""aft-conv: biases by relative position on a grid, one set a head, one key feature a head. [A] equations 6, 8, 9, 10.

The plain formula is a softmax of keys and biases over all tokens. From `PLAIN_WEIGHTS` weights on it does not fit, and
one operator computes the same in less memory: where no number is lost by it, a depth-wise convolution with exp(w) − 1
and a global sum, as the paper writes it; where keys or biases make that cancel or underflow, blocks of queries.

Reference: :func:`quest_core.mechanisms.reference_aft.conv_bias`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError, InputError, UnsupportedError
from ..kernels.pytorch import (
    HAS_OPERATORS,
    is_compiling,
    is_exporting,
    is_exporting_to_onnx,
    is_tracing,
    no_autocast,
    operator,
    transform,
)
from . import reference_aft
from .aft import QUERY, gate, hide, nothing, widen
from .aft_ops import ELEMENTS, finite, no_second_derivative, safe_range
from .base import Dims, Family, local
from .normalisers import PLAIN_WEIGHTS
from .part import Option, Part

TAU = 0.5  # temperature of the Gumbel softmax, [A] section 8
CANCELLATION = 16  # how many times smaller than its parts a difference may be: 4 of the 24 bits of float32


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """cuDNN rounds the inputs of a convolution to 10 bits unless told otherwise."""
    if device.type != "cuda":
        return nullcontext()
    flags = torch.backends.cudnn
    return flags.flags(flags.enabled, flags.benchmark, flags.benchmark_limit, flags.deterministic, False)


def _places(grid: list[int], prefix: int, size: int, device: torch.device) -> Tensor:
    """Where each token stands on the grid, [T, dims]."""
    axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    place = torch.stack([axis.flatten() for axis in axes], dim=1)  # [T − prefix, dims]
    # Prefix tokens lie so far outside the grid, and from each other, that no window reaches them.
    outside = torch.arange(1, prefix + 1, device=device)[:, None] * -(size + sum(grid))
    return torch.cat([outside.expand(-1, len(grid)), place])


def _bins(here: Tensor, place: Tensor, size: int) -> Tensor:
    """The bias of tokens at `place` [T, dims] for queries `here` [N, dims]: indices [N, T], size^dims for none."""
    offset = place - here[:, None] + size // 2  # [N, T, dims]
    inside = ((offset >= 0) & (offset < size)).all(2)
    bins = offset[..., 0]
    for axis in range(1, place.shape[1]):
        bins = bins * size + offset[..., axis]
    # A token is its own neighbour at the centre; a prefix token has no bias even to itself.
    return torch.where(inside & (here[:, :1] >= 0), bins, size ** place.shape[1])


def _table(w: Tensor) -> Tensor:
    """Biases and a zero at the end: [h, s, ...] -> [h, s^dims + 1]."""
    return functional.pad(w.flatten(1), (0, 1))


def _softmax(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The average [B, h, N, D] of v and the log normaliser [B, h, N]: 0 and −inf where nothing is visible."""
    top = finite(logits.detach().amax(3, keepdim=True))
    e = (logits - top).exp()
    total = e.sum(3, keepdim=True)
    return e @ v / torch.where(total > 0, total, 1), (top + total.log()).squeeze(3)


def _in_plain(k: Tensor) -> bool:
    """Whether the weights may be formed: they are small, or the operator cannot run here."""
    if not HAS_OPERATORS or is_exporting() or transform() is not None:
        return True
    # A compiled graph takes the operator always: asking for sizes would make two graphs, below and above the limit.
    return not is_compiling() and _weights(k) < PLAIN_WEIGHTS


def _weights(k: Tensor) -> int:
    return k.shape[0] * k.shape[1] * k.shape[2] ** 2


class _Kernel:
    """Keys [B, h, T], values [B, h, T, D], biases w [h, s, ...] and a grid of T − prefix tokens."""

    def __init__(self, k: Tensor, v: Tensor, w: Tensor, grid: list[int], prefix: int) -> None:
        self.k, self.v, self.w, self.grid, self.prefix = k, v, w, grid, prefix
        self.top = finite(k.amax(2, keepdim=True))  # [B, h, 1]
        x = (k - self.top).exp_().unsqueeze(3)
        self.x = torch.cat([x * v, x], dim=3)  # [B, h, T, D + 1]: numerator and denominator of each key
        self.total = self.x.sum(2, keepdim=True)

    def to_grid(self, x: Tensor) -> Tensor:
        """[B, h, T, D + 1] -> [B·(D + 1), h, *grid], a copy."""
        return x[:, :, self.prefix :].permute(0, 3, 1, 2).reshape(-1, x.shape[1], *self.grid)

    def from_grid(self, x: Tensor) -> Tensor:
        """[B·(D + 1), h, *grid] -> [B, h, T − prefix, D + 1], a view."""
        batch, heads = self.k.shape[:2]
        return x.reshape(batch, -1, heads, math.prod(self.grid)).permute(0, 2, 3, 1)

    def convolves(self) -> bool:
        """Whether the weights are too many to be formed, and exp(w) stays far inside float range.

        Both ways give the same numbers; blocks are the one that is always exact.
        """
        if _weights(self.k) < PLAIN_WEIGHTS:
            return False
        return bool(self.w.abs().amax() <= safe_range(self.k.dtype) / 2)

    def loses_nothing(self, denominator: Tensor) -> bool:
        """Whether exp(w) − 1 cancelled no more than a few bits of the global sum; denominator [B, h, T]."""
        return bool((denominator * CANCELLATION >= self.total[..., 0, -1:]).all())

    def convolved(self) -> Tensor:
        """Numerators and denominators [B, h, T, D + 1] over exp(top), as equation 6 writes them."""
        convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.grid) - 1]
        weight = self.w.expm1().unsqueeze(1)  # [h, 1, s, ...]
        padding = self.w.shape[1] // 2
        sums = self.total.repeat(1, 1, self.k.shape[2], 1)
        with _full_precision(self.k.device):
            local = convolution(self.to_grid(self.x), weight, padding=padding, groups=self.w.shape[0])
        sums[:, :, self.prefix :] += self.from_grid(local)
        return sums

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(queries, logits [B, h, queries, T], bins [queries, T]) for blocks of queries, the bin s^dims for no bias."""
        batch, heads, tokens = self.k.shape
        place, table = _places(self.grid, self.prefix, self.w.shape[1], self.k.device), _table(self.w)
        step = max(1, ELEMENTS // (batch * heads * tokens))
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            bins = _bins(place[rows], place, self.w.shape[1])
            yield rows, self.k.unsqueeze(2) + table[:, bins], bins


@operator(
    "quest::aft_conv",
    schema="(Tensor k, Tensor v, Tensor w, SymInt[] grid, int prefix) -> (Tensor average, Tensor log_normaliser)",
)
def aft_conv(k: Tensor, v: Tensor, w: Tensor, grid: list[int], prefix: int) -> tuple[Tensor, Tensor]:
    """The average of v weighted by exp(k_t' + w) for each query, w by relative position, and its log normaliser.

    Args:
        k: [B, h, T]; a key of −inf is invisible.
        v: [B, h, T, D].
        w: [h, s], [h, s, s] or [h, s, s, s], s odd, the bias of position t + o − s // 2 for query t at index o.
        grid: the extents of the grid that tokens from `prefix` on fill in row-major order.
        prefix: leading tokens without a bias, as queries and as keys.

    Returns:
        [B, h, T, D], zero where nothing is visible, and [B, h, T], −inf there.
    """
    with no_autocast(k.device.type):
        kernel = _Kernel(k, v, w, grid, prefix)
        if kernel.convolves():
            sums = kernel.convolved()
            total = sums[..., -1]
            if kernel.loses_nothing(total):
                y = sums[..., :-1] / torch.where(total > 0, total, 1).unsqueeze(-1)
                return y, torch.where(total > 0, kernel.top + total.log(), -math.inf)
        y, lse = v.new_empty(v.shape), k.new_empty(k.shape)
        for rows, logits, _ in kernel.blocks():
            y[:, :, rows], lse[:, :, rows] = _softmax(logits, v)
        return y, lse


def _fake_conv(k: Tensor, v: Tensor, w: Tensor, grid: list[int], prefix: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), k.new_empty(k.shape)


@operator(
    "quest::aft_conv_backward",
    schema="(Tensor grad, Tensor k, Tensor v, Tensor w, Tensor y, Tensor lse, SymInt[] grid, int prefix) "
    "-> (Tensor k, Tensor v, Tensor w)",
)
def aft_conv_backward(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, y: Tensor, lse: Tensor, grid: list[int], prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `aft_conv` by the path that loses nothing.

    With p_tt' = exp(k_t' + w − lse_t): dv_t' = Σ_t p g_t, dk_t' = Σ_t p g_t·(v_t' − y_t), and the same summed over
    the pairs of a relative position for w.
    """
    with no_autocast(k.device.type):
        kernel = _Kernel(k, v, w, grid, prefix)
        seen = lse > -math.inf
        along = (grad * y).sum(3)  # [B, h, T]
        total = torch.where(seen, (lse - kernel.top).exp(), 0)
        if kernel.convolves() and kernel.loses_nothing(total):
            both = torch.cat([grad, -along.unsqueeze(3)], dim=3)
            both = both * torch.where(seen, 1 / torch.where(seen, total, 1), 0).unsqueeze(3)  # [B, h, T, D + 1]
            dims, weight = len(grid), w.expm1().unsqueeze(1)
            with _full_precision(k.device):
                back, d_weight, _ = torch.ops.aten.convolution_backward(
                    kernel.to_grid(both),
                    kernel.to_grid(kernel.x),
                    weight,
                    None,
                    [1] * dims,
                    [w.shape[1] // 2] * dims,
                    [1] * dims,
                    False,
                    [0] * dims,
                    w.shape[0],
                    [True, True, False],
                )
            received = both.sum(2, keepdim=True).repeat(1, 1, k.shape[2], 1)
            received[:, :, prefix:] += kernel.from_grid(back)
            x = kernel.x[..., -1]
            d_k = x * ((v * received[..., :-1]).sum(3) + received[..., -1])
            return d_k, x.unsqueeze(3) * received[..., :-1], w.exp() * d_weight.squeeze(1)
        d_k, d_v = k.new_zeros(k.shape), v.new_zeros(v.shape)
        d_table = w.new_zeros(w.shape[0], w[0].numel() + 1)
        lse = torch.where(seen, lse, math.inf)
        for rows, logits, bins in kernel.blocks():
            p = logits.sub_(lse[:, :, rows].unsqueeze(3)).exp_()  # [B, h, queries, T]
            g = grad[:, :, rows]
            d_v += p.mT @ g
            p *= g @ v.mT - along[:, :, rows].unsqueeze(3)
            d_k += p.sum(2)
            d_table.index_add_(1, bins.flatten(), p.sum(0).flatten(1))
        return d_k, d_v, d_table[:, :-1].reshape(w.shape)


def _fake_gradients(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, y: Tensor, lse: Tensor, grid: list[int], prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape), w.new_empty(w.shape)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.grid, ctx.prefix = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    return (*aft_conv_backward(grad, *ctx.saved_tensors, ctx.grid, ctx.prefix), None, None)


def _second(ctx: Any, *_: Any) -> Any:
    no_second_derivative("aft-conv")


aft_conv.register_fake(_fake_conv)
aft_conv.register_autograd(_gradients, setup_context=_saves)
aft_conv_backward.register_fake(_fake_gradients)
aft_conv_backward.register_autograd(_second, setup_context=lambda ctx, inputs, output: None)


class AttentionFreeConv(Family):
    """One bias for each head and relative position on a 1d, 2d or 3d grid. [A] equation 6.

    Attributes:
        weight: [h, s, ...], the raw biases; their mean and scale cancel (equation 8).
        gain: γ [h], and shift: β [h], both 0 at the start, so that the layer starts as aft-simple with one key a head.
        grid: extents of the grid, None where not fixed, or None to infer it: any length in 1d, a square in 2d, a
            cube in 3d. It may be assigned before a forward whose crop has another shape.
    """

    def __init__(
        self,
        sizes: Dims | None,
        /,
        *,
        window: int,
        dims: int,
        grid: str | None,
        prefix: int,
        gumbel: bool,
        entropy_weight: float,
        query: bool,
    ) -> None:
        super().__init__()
        if window % 2 == 0:
            raise ConfigError(
                f"attention 'aft-conv': window is {window}; it needs a centre, so choose an odd number such as "
                f"{window - 1} or {window + 1}"
            )
        if dims > 3:
            raise ConfigError(f"attention 'aft-conv': dims is {dims}; a grid has 1, 2 or 3 axes")
        assert sizes is not None
        self.query, self.prefix, self.gumbel, self.entropy_weight = query, prefix, gumbel, entropy_weight
        self.axes = dims
        self.grid = _read_grid(grid, dims)
        self.weight = nn.Parameter(torch.randn(sizes.num_heads, *[window] * dims))
        self.gain = nn.Parameter(torch.zeros(sizes.num_heads))
        self.shift = nn.Parameter(torch.zeros(sizes.num_heads))

    def bias(self) -> Tensor:
        """w = γ (w − mean) / std + β, [h, s, ...], by equation 8; each head over its own positions."""
        weight, gain, shift = widen(local(self.weight)), widen(local(self.gain)), widen(local(self.shift))
        raw = weight.flatten(1)  # [h, positions]
        centred = raw - raw.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        varies = variance > 0
        scaled = centred * torch.where(varies, torch.where(varies, variance, 1).rsqrt(), 0)
        return torch.addcmul(shift[:, None], gain[:, None], scaled).view(weight.shape)

    def entropy(self) -> Tensor:
        """Σ over heads of the entropy of softmax(w), in nats: the sparsity regulariser of equation 9, a scalar."""
        log_p = functional.log_softmax(self.bias().flatten(1), 1)  # [h, positions]
        return -(log_p.exp() * log_p).sum()

    def penalty(self) -> Tensor:
        """`entropy_weight` · equation 9: what a trainer adds to its loss."""
        return self.entropy_weight * self.entropy()

    def _positions(self) -> Tensor:
        """The biases to use: all, or by equation 10 one position a head, sampled softly while training."""
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """See `Family.forward`; k is [B, H, T, 1].

        Raises:
            InputError: tokens that do not fill the grid.
            UnsupportedError: q and k of different lengths.
        """
        tokens = k.shape[2]
        if q.shape[2] != tokens:
            raise UnsupportedError(
                f"attention 'aft-conv' needs queries and keys on one grid, not {q.shape[2]} queries and {tokens} keys; "
                "use 'aft-simple' or 'aft-full' to attend across"
            )
        grid = self._extents(tokens - self.prefix)
        if (empty := nothing(q, k, v)) is not None:
            return empty
        keys, values = hide(widen(k), key_mask).squeeze(3), widen(v)
        w = self._positions().to(keys.dtype)
        if _in_plain(keys):
            place = _places(grid, self.prefix, w.shape[1], w.device)
            with no_autocast(w.device.type):
                y, _ = _softmax(keys.unsqueeze(2) + _table(w)[:, _bins(place, place, w.shape[1])], values)
        else:
            y, _ = aft_conv(keys, values, w, grid, self.prefix)
        return gate(q, y, self.query)

    def _extents(self, count: int) -> list[int]:
        """The grid that `count` tokens fill."""
        if is_exporting():
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
            wanted = [_root(count, self.axes)] * self.axes
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


def _root(count: int, power: int) -> int:
    """The whole number whose `power` is nearest to `count`."""
    if is_exporting():
        return next(i for i in range(max(count, 0) + 1) if i**power >= count)  # for one length
    root: int = round(max(count, 0) ** (1 / power))
    return root


def _read_grid(text: str | None, axes: int) -> tuple[int | None, ...] | None:
    """'14x14' -> (14, 14) and '*x14' -> (None, 14)."""
    if text is None:
        return None
    pieces = text.split("x")
    good = all(piece == "*" or (piece.isdigit() and int(piece) > 0) for piece in pieces)
    if not good or len(pieces) != axes or pieces.count("*") > 1:
        example = {1: "196", 2: "14x14' or '*x14", 3: "8x14x14' or '*x14x14"}[axes]
        raise ConfigError(
            f"attention 'aft-conv': grid is {text!r}; with dims={axes} write '{example}', at most one extent as *"
        )
    return tuple(None if piece == "*" else int(piece) for piece in pieces)


def position_penalty(model: nn.Module) -> Tensor | float:
    """The sum of `penalty` over every aft-conv layer of a model, 0 without any: add it to the loss."""
    return sum((part.penalty() for part in model.modules() if isinstance(part, AttentionFreeConv)), 0.0)


PARTS = (
    Part(
        "aft-conv",
        "family",
        "σ(Q) ⊙ (conv(exp(K) V, exp(w) − 1) + Σ exp(K) V) / (conv(exp(K), exp(w) − 1) + Σ exp(K))",
        "[A] eq. 6, 8, 9, 10",
        AttentionFreeConv,
        (
            Option("window", int, 11, "positions s of the bias along each axis, odd; the paper's models use 11", 1),
            Option("dims", int, 2, "axes of the grid: 1, 2 or 3", 1),
            Option("grid", str, None, "its extents, '14x14' or '*x14'; null: a line, square or cube", nullable=True),
            Option("prefix", int, 0, "leading tokens off the grid (class token, registers), without a bias", 0),
            Option("gumbel", bool, False, "one position a head: Gumbel softmax while training, hard in evaluation"),
            Option("entropy_weight", float, 0.0, "factor of the sparsity regulariser; the paper's is 0.001", 0),
            QUERY,
        ),
        learnable=True,
        reshapes=True,
        reference=reference_aft.conv_family,
        causal_reason="its convolution looks both ways along every axis of the grid",
        reads=("tokens", "order", "length"),
        key_features=1,
        complexity="O(T·s^dims·d) time on large grids, O(T·d) memory",
    ),
)
