"""What a mechanism implements: one class for each axis. Its promises are those of `quest_core.registry.Component`.

A mechanism is score × normalizer × grouping. The score prepares queries and keys so that the logits are
``scale · q kᵀ``; the normalizer turns logits into weights and applies them to the values; the grouping says which
key/value head a query head uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..cache import Cache
from ..ops import apply_weights, drop, logits, merge_causal
from ..registry import Component


@dataclass(frozen=True)
class Dims:
    """What a component may need to know when it is built.

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


class Score(Component):
    """How q and k meet. A subclass overrides `default_scale`, and `query` and `key` or, to see values, `prepare`."""

    axis = "score"
    dropout = compares = True

    def __init__(self, dims: Dims | None, *, scale: float | None = None) -> None:
        super().__init__()
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


class Normalizer(Component):
    """How logits become weights. A subclass overrides `weights`, and `forward` if the weights need not be formed."""

    axis = "normalizer"
    compares = True

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

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


class Grouping(Component):
    """Which key/value head a query head uses. By default query head h uses head h · G // H."""

    axis = "grouping"
    dropout = compares = True

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def kv_heads(self, num_heads: int) -> int:
        """Return the number of key/value heads G for H query heads."""
        raise NotImplementedError

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        """Return why tensors with these heads do not fit, or None."""
        raise NotImplementedError

    def assign(self, k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor | None:
        """Return the key/value head of each query head, [H] on the device of `k`, or None for equal consecutive groups.

        Args:
            k: keys before any normalization, [B, G, M, D].
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


class Family(Component):
    """A mechanism that never forms the N×M weights and is therefore not combined.

    A subclass computes `forward` and, where it can be causal, `decode`. Masks reach it as a key mask only.
    """

    axis = "family"

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

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
