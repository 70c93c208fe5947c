"""Normalizers: logits to weights. Softmax has fused kernels; large calls of the others take blocks of queries."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import VERSION, is_exporting, is_traced_to_onnx, refuse_to_count_keys, size, transform, wider
from ..ops import apply_weights, block_rows, drop, in_blocks, logits, merge_causal, narrow, visible, widen
from ..registry import Option, register
from . import naive
from .base import Dims, Normalizer

HIDDEN = -1e30  # sinkhorn's hidden logits: a row or column of them has a finite sum, whose gradient is 0 and not NaN
# Sinkhorn's log factors c of columns, [B, H, 1, M] or 0: those before the last half-step on rows, and those at the end.
Columns: TypeAlias = tuple[Tensor | float, Tensor | float]
MEMORY_IN_BLOCKS = "O(N + M) memory; O(N·M) under torch.compile, which takes no blocks of queries"
IN_BLOCKS = f"O(N·M·D) time, {MEMORY_IN_BLOCKS}"


@register("softmax", source="Vaswani et al., 2017")
class Softmax(Normalizer):
    """exp(l) / Σ exp(l).

    The sum is over the visible keys; scaled_dot_product_attention computes it.
    """

    causal = cross = cached = dropout = fused = rowwise = True
    reads: ClassVar[tuple[str, ...]] = ()
    kernel = "scaled_dot_product_attention"
    attend: ClassVar[Callable[..., Tensor] | None] = None
    """The method of a subclass that takes the place of `scaled_dot_product_attention`, with its arguments."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        grouped: bool,
        **plain: Any,
    ) -> Any:
        if plain or transform():  # the kernels have neither rules for batches nor forward derivatives
            how = {**plain, "scale": scale, "dropout_p": dropout_p, "grouped": grouped}
            return super().forward(q, k, v, mask=mask, is_causal=is_causal, **how)
        if is_causal:
            n, m = q.shape[2], k.shape[2]
            if n == 1 and not is_exporting():  # which would fix that size
                is_causal = False  # the last query sees every key
            elif mask is not None or n != m:  # PyTorch aligns causal masks at the first key
                mask, is_causal = merge_causal(mask, n, m, q.device), False
        if scale <= 0:
            q, scale = q * scale, 1.0  # the kernels look for the largest product before they scale it
        blind = None
        if mask is not None:
            if is_exporting():  # other runtimes divide 0 by 0 in rows that see no key
                blind = ~visible(mask).any(-1, keepdim=True)  # [B or 1, H or 1, N or 1, 1]
                mask = mask[(None,) * (4 - mask.dim())]
                wide = blind.expand_as(mask)  # as `expand_mask`
                mask = mask | wide if mask.dtype == torch.bool else mask.masked_fill(wide, 0)
            mask = mask if mask.dtype == torch.bool else narrow(mask, q.dtype)
        # Of the fused kernels, only that of the CPU takes shared heads with a mask; that of PyTorch 2.5 takes none.
        shares = VERSION >= (2, 6) if q.is_cpu else mask is None
        if grouped and (not shares or is_traced_to_onnx()):
            share = size(q, 1) // size(k, 1)
            k, v, grouped = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), False
        batch, head, token, feature = q.stride()
        if feature == 1 and (batch < 2 or head < 2 or token < 2) and not q.is_contiguous():
            q = q.contiguous()  # its queries overlap; so would PyTorch's output
        attend = self.attend or F.scaled_dot_product_attention
        out = attend(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
        return out if blind is None else out.masked_fill(blind.expand_as(out), 0)  # as `expand_mask`

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return logits.softmax(-1)
        seen = visible(mask)
        blind = ~seen.any(-1, keepdim=True).expand_as(logits)  # rows with no visible key; expanded as in `expand_mask`
        logits = logits.masked_fill(~seen, -math.inf) if mask.dtype == torch.bool else logits + mask
        return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        return naive.softmax(logits, seen)


@register(
    "sigmoid",
    source="Your Attention Matters, eq. 5; Ramapuram et al., 2024",
    options=(Option("bias", float, None, "the constant b; null means −log of the row's visible keys", nullable=True),),
)
class Sigmoid(Normalizer):
    """σ(l + b), b = −log of the visible keys.

    Each weight is computed independently, so a row need not sum to 1. By default it sums to about 1 at first.
    """

    causal = cross = cached = dropout = True
    reads = ("tokens",)
    rowwise = True
    complexity = IN_BLOCKS

    def __init__(self, dims: Dims | None, *, bias: float | None) -> None:
        super().__init__(dims)
        self.bias = bias

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        seen, shifted = _seen(mask, logits), widen(logits)
        if mask is not None and mask.dtype != torch.bool:
            shifted = shifted + mask
        if self.bias is None:
            refuse_to_count_keys("sigmoid")
            count = seen.sum(-1, keepdim=True).clamp(min=1).to(shifted.dtype)  # [B, H, N, 1] at most
            shifted = shifted - count.log().expand_as(shifted)  # as `expand_mask`
        else:
            shifted = shifted + self.bias
        weights = shifted.sigmoid()
        if mask is not None:
            weights = weights.masked_fill(~seen, 0)
        return weights.to(logits.dtype)

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        count = seen.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype)
        bias = -count.log() if self.bias is None else self.bias
        return torch.sigmoid((logits + bias).masked_fill(~seen, 0)) * seen


@register(
    "sinkhorn",
    source="Your Attention Matters, eq. 7–10; Sinkformers",
    options=(
        Option("iterations", int, 3, "half-steps, rows first; 1 is softmax, an odd number ends on rows", 1),
        Option("eps", float, 1.0, "temperature ε that the logits are divided by", 1e-6),
    ),
)
class Sinkhorn(Normalizer):
    """rows of exp(l/ε) to sum 1, columns to sum N/M, in turn.

    From exp(l/ε), half-steps alternate, rows first: scale every row to sum 1, then every column to sum N/M. Rows that
    see no key and columns that no row sees are padding: they take no mass, and N and M count only the others. An odd
    number of half-steps ends on rows; one is softmax(l/ε). Additive masks are added to l, before the division by ε.

    Where padding tokens are queries too, as in self-attention, `Mechanism.padding_mask` hides their rows too, because
    each row takes its share of each column.
    """

    # In logarithms, with z = l/ε, weights are exp(z + r + c). A half-step on rows sets r = −logsumexp(z + c), one on
    # columns c = log(N/M) − logsumexp(z + r). Only c is kept, because r follows from it row by row.

    cross = dropout = True
    causal_reason = "a lower-triangular doubly stochastic matrix is the identity"
    reads = ("tokens", "queries", "unseen")
    complexity = f"O(iterations·N·M·D) time, {MEMORY_IN_BLOCKS}"

    def __init__(self, dims: Dims | None, *, iterations: int, eps: float) -> None:
        super().__init__(dims)
        self.iterations = iterations
        self.eps = eps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, **how: Any) -> Any:
        rows = block_rows(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
        if rows is None or {"residual", "perturb", "change", "need_weights"} & how.keys():
            return super().forward(q, k, v, mask=mask, **how)
        scale, grouped, dropout_p = how["scale"], how["grouped"], how["dropout_p"]

        def log_sums(columns: Tensor | float) -> Tensor:
            def of_block(q: Tensor, k: Tensor, _: Tensor, mask: Tensor | None) -> Tensor:
                return _log_column_sums(self._mask_logits(logits(q, k, scale, grouped), mask), columns)

            return in_blocks(of_block, rows, q, k, k[..., :0], mask).logsumexp(2, keepdim=True)

        like = q.new_zeros((), dtype=wider(q.dtype)).expand(1, 1, q.shape[2], k.shape[2])
        columns = self._columns(log_sums, _log_column_target(mask, like))

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            weights = _weights(self._mask_logits(logits(q, k, scale, grouped), mask), columns)
            return apply_weights(drop(weights.to(v.dtype), dropout_p), v, grouped)

        return in_blocks(attend, rows, q, k, v, mask, random=dropout_p > 0)

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        z = self._mask_logits(logits, mask)
        columns = self._columns(lambda columns: _log_column_sums(z, columns), _log_column_target(mask, z))
        return _weights(z, columns).to(logits.dtype)

    def _mask_logits(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return (logits + mask) / ε in float32 or wider, `HIDDEN` where the mask hides."""
        z = widen(logits)
        if mask is not None and mask.dtype != torch.bool:
            z = z + mask
        z = z if self.eps == 1 else z / self.eps
        return z if mask is None else z.masked_fill(~visible(mask), HIDDEN)

    def _columns(self, log_sums: Callable[[Tensor | float], Tensor], target: Tensor) -> Columns:
        """Return the factors after all half-steps, for log sums of columns that follow from factors by `log_sums`."""
        before: Tensor | float = 0.0
        end: Tensor | float = 0.0
        for _ in range(self.iterations // 2):
            before, end = end, _log_factors(log_sums(end), target)
        return end if self.iterations % 2 else before, end  # an odd number ends on rows

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        rows, columns = (seen.any(axis).sum(-1)[..., None, None].clamp(min=1).to(logits.dtype) for axis in (-1, -2))
        weights = naive.softmax(logits / self.eps, seen)  # the first half-step, in the form that cannot overflow
        for step in range(2, self.iterations + 1):
            axis, wanted = (-2, rows / columns) if step % 2 == 0 else (-1, 1)
            weights = naive.ratio(weights, weights.sum(axis, keepdim=True)) * wanted
        return weights


def _seen(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the mask as booleans, broadcastable to the logits `like` and as wide: [..., N or 1, M]."""
    if mask is None:
        return torch.ones(like.shape[-1], dtype=torch.bool, device=like.device)[None]
    return visible(mask).expand(-1, -1, -1, like.shape[-1])


def _log_column_sums(z: Tensor, columns: Tensor | float) -> Tensor:
    """Return log sums of columns [B, H, 1, M] of exp(z + r), z [B, H, N, M], after the rows' step for `columns`."""
    return (z + _log_factors((z + columns).logsumexp(-1, keepdim=True))).logsumexp(-2, keepdim=True)


def _weights(z: Tensor, columns: Columns) -> Tensor:
    """Return the weights of rows z [B, H, N, M] from the factors that `Sinkhorn._columns` returns."""
    before, end = columns
    return (z + _log_factors((z + before).logsumexp(-1, keepdim=True)) + end).exp()


def _log_factors(log_sums: Tensor, target: Tensor | float = 0.0) -> Tensor:
    """Return log factors that bring sums to exp(target); 0 for padding, which has no sum."""
    return (target - log_sums).masked_fill(log_sums < HIDDEN / 2, 0)


def _log_column_target(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return log(N/M) [B or 1, H or 1, 1, 1]; N counts the rows that see a key, M the columns that a row sees.

    The sizes of the logits `like` [B, H, N, M] are counted and not read, so that no graph fixes them.
    """
    seen = _seen(mask, like)
    seen = seen.expand(*seen.shape[:-2], *like.shape[-2:])  # [..., N, M]
    rows, columns = (
        seen.any(axis, keepdim=True).sum((-2, -1), keepdim=True).clamp(min=1).to(like.dtype).log() for axis in (-1, -2)
    )
    return rows - columns
