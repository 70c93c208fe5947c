"""What a part of a mechanism implements: one class for each axis.

A mechanism is score × normaliser × grouping. The score prepares queries and keys so that the logits are
``scale · q kᵀ``; the normaliser turns logits into weights and applies them to the values; the grouping says which
key/value head a query head uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Cache
from ..kernels.pytorch import HAS_DTENSOR, autocast_dtype, is_eager, may_read, until_changed, wider


@dataclass(frozen=True)
class Dims:
    """What a part may need to know when it is built.

    Attributes:
        num_heads: query heads H.
        kv_heads: key/value heads G.
        head_dim: features D per query/key head.
        standard_scale: the factor of a standard score, where a host's is not 1/√D.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    standard_scale: float | None = None


class Axis(nn.Module):
    """What `Part.build` returns. A subclass with options or parameters overrides `__init__`."""

    def __init__(self, dims: Dims | None = None) -> None:
        super().__init__()


class Score(Axis):
    """How q and k meet. A subclass overrides `default_scale`, and `query` and `key` or, to see values, `prepare`."""

    def __init__(self, dims: Dims | None, *, scale: float | None = None) -> None:
        super().__init__(dims)
        self.given_scale = scale

    def scale(self, head_dim: int) -> float:
        """Return the factor on q kᵀ: the `scale` option, or the score's own."""
        return self.default_scale(head_dim) if self.given_scale is None else self.given_scale

    def default_scale(self, head_dim: int) -> float:
        return 1.0

    def query(self, q: Tensor) -> Tensor:
        """Return q [B, H, N, D] ready for the dot product, in the same shape."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Return k [B, G, M, D] ready for the dot product, in the same shape; a cache stores this."""
        return k

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        cache: Cache | None,
        head: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys ready for the dot product; arguments as in `Mechanism.forward`.

        Args:
            cache: the layer's state while decoding; `v` and `k` are then only the new tokens.
            head: the key/value head of each query head [H], where the grouping is not that of equal groups.
        """
        return self.query(q), self.key(k)


class Normaliser(Axis):
    """How logits become weights. A subclass overrides `weights`, and `forward` if the weights need not be formed."""

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
    ) -> Tensor:
        """Return the attention output [B, H, N, Dv].

        Args:
            q: [B, H, N, D] and k: [B, G, M, D], as the score prepared them.
            v: [B, G, M, Dv].
            mask: None, boolean (True = may attend) or additive (−inf hides), broadcastable to [B, H, N, M].
            is_causal: query i sees keys j ≤ i + M − N.
            grouped: H/G consecutive query heads share a key/value head; False means G = H.
        """
        mask = merge_causal(mask, q.shape[2], k.shape[2], q.device) if is_causal else mask
        weights = self.weights(logits(q, k, scale, grouped), mask)
        return apply_weights(drop(weights, dropout_p), v, grouped)

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights [B, H, N, M] of logits [B, H, N, M]: 0 where hidden, also in a row that sees no key."""
        raise NotImplementedError


class Grouping(Axis):
    """Which key/value head a query head uses. By default query head h uses head h · G // H."""

    def kv_heads(self, num_heads: int) -> int:
        """Return the number of key/value heads G for H query heads."""
        raise NotImplementedError

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        """Return why tensors with these heads do not fit, or None."""
        raise NotImplementedError

    def assign(self, k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor | None:
        """Return the key/value head of each query head, [H] on the device of `k`, or None for equal consecutive groups.

        Args:
            k: keys before any normalisation, [B, G, M, D].
            mask: as in `Mechanism.forward`; keys that no query sees do not count.
        """
        return None

    def perturb(self, weights: Tensor, kv_heads: int, mask: Tensor | None) -> Tensor:
        """Return the weights [B, H, N, M] that are applied to the values; by default those given."""
        return weights

    needs_weights: bool = False
    """Whether `perturb` does anything, so that no fused path applies."""

    shares: bool = False
    """Whether H/G consecutive query heads share a key/value head, unless `assign` says another one."""


class Family(Axis):
    """A mechanism that never forms the N×M weights and is therefore not combined.

    A subclass computes `forward` and, where it can be causal, `decode`. Masks reach it as a key mask only.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return the output [B, H, N, D] of q [B, H, N, D], k [B, H, M, Dk] and v [B, H, M, D].

        Args:
            key_mask: None, boolean (True = visible) or additive (−inf hides), [B or 1, M].
            is_causal: query i sees keys j ≤ i + M − N.
        """
        raise NotImplementedError

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, key_mask: Tensor | None) -> Tensor:
        """Return the causal output [B, H, N, D] of N new tokens after those in the cache; extends the cache.

        `Mechanism.decode` changes ``cache.tokens``; this method must not.

        Args:
            key_mask: as in `forward`, [B or 1, N]: whether the new tokens are visible, to themselves and later ones.
        """
        raise NotImplementedError


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it has that type."""
    return x.to(wider(x.dtype))


def result_type(x: Tensor) -> torch.dtype:
    """Return the type of a matrix product with `x`: under autocast the lower one, except for float64."""
    lower = autocast_dtype(x.device.type)
    return x.dtype if lower is None or x.dtype == torch.float64 else lower


def local(parameter: Tensor) -> Tensor:
    """Return the part of a mechanism's parameter for the heads of this rank; all of it without tensor parallelism.

    Every mechanism that :class:`quest_core.tools.parallel.HeadParallel` divides reads its parameters through this.
    """
    if type(parameter) in (Tensor, nn.Parameter) or not HAS_DTENSOR:
        return parameter
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(parameter, DTensor):
        return parameter
    if all(isinstance(placement, Replicate) for placement in parameter.placements):
        # Each rank's gradient comes from its own heads. `redistribute` does nothing here, and sums on the way back.
        shared = parameter.redistribute(placements=parameter.placements)
        return shared.to_local(grad_placements=[Partial()] * len(parameter.placements))
    return parameter.to_local()


def logits(q: Tensor, k: Tensor, scale: float, grouped: bool, residual: Tensor | None = None) -> Tensor:
    """Return scale · q kᵀ (+ residual), [B, H, N, M], for q [B, H, N, D] and k [B, G, M, D].

    Args:
        grouped: H/G consecutive query heads share a key head; False means G = H.
        residual: [B, H, N, M] or broadcastable to it.
    """
    q = q if scale == 1 else q * scale
    if grouped:
        shared = q.unflatten(1, (-1, q.shape[1] // k.shape[1]))  # [B, G, H/G, N, D]
        scores: Tensor = (shared @ k.unsqueeze(2).transpose(-2, -1)).flatten(1, 2)
    else:
        scores = q @ k.transpose(-2, -1)  # not mT, which the tracing exporter to ONNX does not know
    return scores if residual is None else scores + residual


def apply_weights(weights: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """Return weights [B, H, N, M] times v [B, G, M, Dv], [B, H, N, Dv]; `grouped` as in `logits`."""
    weights = weights.to(v.dtype)  # an additive mask of a wider type has widened them
    if not grouped:
        return weights @ v
    shared = weights.unflatten(1, (-1, weights.shape[1] // v.shape[1]))  # [B, G, H/G, N, M]
    out: Tensor = (shared @ v.unsqueeze(2)).flatten(1, 2)
    return out


def drop(weights: Tensor, dropout_p: float) -> Tensor:
    """Return the weights after dropout."""
    return F.dropout(weights, dropout_p) if dropout_p > 0 else weights


def hide_lowest(mask: Tensor) -> Tensor:
    """Return an additive mask in which every value at or below half of its type's minimum is −inf, and so hides."""
    # Twice the value against the minimum: exporters round constants to float32, and half of float64's would be −inf.
    return mask.masked_fill(mask + mask <= torch.finfo(mask.dtype).min, -math.inf)


def visible(mask: Tensor) -> Tensor:
    """Return what a mask leaves visible, boolean [B or 1, H or 1, N or 1, M or 1].

    Args:
        mask: boolean (True = may attend) or additive (−inf hides), [N, M] or broadcastable to [B, H, N, M].
    """
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    return seen[(None,) * (4 - seen.dim())]


def hides_the_future(mask: Tensor, *, only: bool = False) -> bool:
    """Return whether a mask hides every key j > i + M − N from query i, and is not a mask of padding.

    False where it cannot be read, as under a compiler. Reading waits for a GPU, so each mask is read once.

    Args:
        mask: boolean (True = may attend) or additive (−inf and lowest values hide), broadcastable to [B, H, N, M].
        only: whether it must hide nothing else and add nothing, so that is_causal replaces it.
    """
    if not (is_eager() and may_read(mask, waits=True)):
        return False

    @torch.no_grad()  # or a checkpoint would save tensors here, and find none when it repeats the call
    def found() -> bool:
        n, m = mask.shape[-2:]
        seen = visible(mask if mask.dtype == torch.bool else hide_lowest(mask))
        past = torch.ones(n, m, dtype=torch.bool, device=mask.device).tril(m - n)
        if only:  # visible entries are True, or add 0
            return bool(((seen == past) & (~seen | (mask == (mask.dtype == torch.bool)))).all())
        padding = seen.any(-1, keepdim=True) & seen.any(-2, keepdim=True)
        return bool((past | ~seen).all() & (seen != padding).any() & seen.tril(m - n - 1).any())

    return until_changed(mask, ("hides_the_future", only), found)


def merge_masks(one: Tensor | None, other: Tensor) -> Tensor:
    """Return one mask for both, which are boolean (True = may attend) or additive, broadcastable to each other."""
    if one is None:
        return other
    if other.dtype != torch.bool:
        one, other = other, one
    if other.dtype != torch.bool:
        return one + other
    return one & other if one.dtype == torch.bool else one.masked_fill(~other, -math.inf)


def merge_causal(mask: Tensor | None, n: int, m: int, device: torch.device) -> Tensor:
    """Return one mask that means `mask` and causal: query i sees keys j ≤ i + M − N, the last query every key."""
    return merge_masks(mask, torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n))
