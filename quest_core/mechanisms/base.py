"""The classes that a mechanism implements, one per axis. Its promises are those of `quest_core.registry.Component`.

A mechanism is score × normalizer × grouping. The score prepares queries and keys so that the logits are
``scale · q kᵀ``; the normalizer turns logits into weights and applies them to the values; the grouping says which
key/value head a query head uses. Around the normalizer there may be a ScoreMod, which changes the logits, and an
Output, which changes what comes out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache
from ..compat import size
from ..ops import apply_weights, block_rows, drop, in_blocks, logits, merge_causal, merge_masks
from ..registry import Component
from ..registry import Dims as Dims


class Score(Component):
    """How q and k meet. A subclass overrides `query`, `key` and `factor`, or `forward` to see values too."""

    axis = "score"
    dropout = compares = True
    factor: float | None = 1  # and not 1.0, which a dynamic graph takes for an input, so that it is compiled twice
    """The factor on q kᵀ, which `scale` returns; None is that of the host (`Dims.standard_scale`), or 1/√D."""

    def __init__(self, dims: Dims | None, *, scale: float | None = None) -> None:
        super().__init__(dims)
        if scale is not None:
            self.factor = scale
        elif self.factor is None and dims is not None:
            self.factor = dims.standard_scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        head: Tensor | None = None,
        cache: Cache | None = None,
        unit_keys: bool = False,
    ) -> tuple[Tensor, Tensor, float]:
        """Return q [B, H, N, D] and k [B, G, M, D] ready for the dot product, and the factor on q kᵀ.

        Arguments as in `Mechanism.forward`, and:

        Args:
            head: the key/value head of each query head [H], or None for equal consecutive groups.
            cache: the layer's state while decoding; k and v are only the new tokens then.
            unit_keys: k holds unit vectors already.
        """
        scale = self.scale(size(q, -1)) if self.factor is None else self.factor  # two calls less
        return self.query(q), k if unit_keys else self.key(k), scale

    def scale(self, head_dim: int) -> float:
        """Return the factor on q kᵀ for queries of `head_dim` features."""
        return 1 / head_dim**0.5 if self.factor is None else self.factor  # PyTorch 2.5 compiles no sqrt of a size

    def query(self, q: Tensor) -> Tensor:
        """Return q [B, H, N, D] ready for the dot product, in the same shape."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Return k [B, G, M, D] ready for the dot product, in the same shape; a cache stores this."""
        return k

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        """Return the logits [B, H, N, M], scale included, by the plain formula that tests compare with.

        `head` is the key/value head of each query head [H], as in ``k[:, head]``, and `seen` [B, H, N, M] says where a
        query sees a key.
        """
        raise NotImplementedError


class Normalizer(Component):
    """How logits become weights. A subclass overrides `weights`, and `forward` if the weights need not be formed."""

    axis = "normalizer"
    compares = True
    kernel: str = "written out"
    """The function by which `forward` attends, as reports name it; products and sums are "written out"."""
    rowwise: bool = False
    """Whether the weights of a query depend on its own logits only, so that large calls take blocks of queries."""

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
        residual: Tensor | None = None,
        perturb: Callable[[Tensor, int, Tensor | None], Tensor] | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Return the output [B, H, N, Dv] by the plain formula; `is_causal` means that query i sees keys j ≤ i + M − N.

        A subclass that overrides this method takes the last four arguments as ``**plain``, and returns
        ``super().forward(...)`` if there are any.

        Args:
            q: [B, H, N, D] and k: [B, G, M, D], as the score prepared them.
            v: [B, G, M, Dv].
            scale: the factor on q kᵀ.
            mask: None, boolean (True = may attend) or additive (−inf hides), broadcastable to [B, H, N, M].
            dropout_p: dropout on the weights.
            grouped: H/G consecutive query heads share a key/value head; False means G = H.
            residual: added to the logits [B, H, N, M].
            perturb: `Grouping.perturb`, if the grouping changes the weights.
            change: `ScoreMod.change`, if there is one that changes the logits.
            need_weights: return (output, weights after dropout [B, H, N, M], logits [B, H, N, M]) instead.
        """

        def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
            mask = merge_causal(mask, q.shape[2], k.shape[2], q.device) if is_causal else mask
            scores = logits(q, k, scale, grouped, residual)
            scores = scores if change is None else change(scores)
            weights = self.weights(scores, mask) if size(scores, -1) > 0 else scores  # of no keys
            weights = drop(weights if perturb is None else perturb(weights, k.shape[1], mask), dropout_p)
            out = apply_weights(weights, v, grouped)
            if not need_weights:
                return out
            return out, weights, scores if mask is None or mask.dtype == torch.bool else scores + mask

        rows = None
        if self.rowwise and residual is None and perturb is None and not need_weights:
            rows = block_rows(q.shape[2], q.shape[0] * q.shape[1] * k.shape[2])
        if rows is None:
            return formula(q, k, v, mask)
        return in_blocks(formula, rows, q, k, v, mask, is_causal=is_causal, random=dropout_p > 0)

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights [B, H, N, M] of logits [B, H, N, M]: 0 where hidden, also in a row that sees no key."""
        raise NotImplementedError

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Return `weights` by the plain formula; `seen` [B, H, N, M] says where a query sees a key."""
        raise NotImplementedError


class Grouping(Component):
    """Which key/value head a query head uses. By default query head h uses head h · G // H."""

    axis = "grouping"
    dropout = compares = True

    def kv_heads(self, num_heads: int) -> int:
        """Return the number of key/value heads G for H query heads."""
        raise NotImplementedError

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        """Return why tensors with these heads do not fit, or None."""
        raise NotImplementedError

    def forward(self, k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
        """Return the key/value head of each query head, [H] on the device of `k`, if the grouping `chooses`.

        `k` [B, G, M, D] is not normalized yet. Keys that no query sees by `mask`, as in `Mechanism.forward`, do not
        count.
        """
        raise NotImplementedError

    def perturb(self, weights: Tensor, kv_heads: int, mask: Tensor | None) -> Tensor:
        """Return the weights [B, H, N, M] that are applied to the values; by default those given."""
        return weights

    @property
    def chooses(self) -> bool:
        """Whether `forward` returns the key/value head of each query head; without it `forward` is not called."""
        return type(self).forward is not Grouping.forward

    @property
    def needs_weights(self) -> bool:
        """Whether `perturb` does anything, so that no fused path applies."""
        return type(self).perturb is not Grouping.perturb

    def reference(self, k: Tensor, num_heads: int, seen: Tensor) -> Tensor:
        """Return the key/value head of each query head [H], by the plain formula.

        `seen` [B, H, N, M] says where a query sees a key.
        """
        raise NotImplementedError

    def reference_weights(self, weights: Tensor, kv_heads: int, seen: Tensor) -> Tensor:
        """Return `perturb` by the plain formula; `seen` as in `reference`."""
        raise NotImplementedError


class ScoreMod(Component):
    """What happens to logits before they are normalized, as a `score_mod` of flex_attention: a cap, a bias by position.

    A subclass overrides `change`, which forms the logits; or it overrides `bias`, which a fused kernel takes
    as a mask, and declares `fused`.
    """

    axis = "score_mod"
    dropout = compares = True

    def forward(
        self,
        normalizer: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor | None,
        cache: Cache | None,
        mask: Tensor | None,
        **how: Any,
    ) -> Any:
        """Return what `normalizer` does with the changed logits; arguments as in `Mechanism` and `Normalizer`."""
        if not self.fused:
            return normalizer(q, k, v, mask=mask, change=self.change, **how)
        return normalizer(q, k, v, mask=merge_masks(mask, self.bias(q, k, x, cache)), **how)

    def change(self, logits: Tensor) -> Tensor:
        """Return the changed logits [B, H, N, M], which masks have not touched."""
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, x: Tensor | None, cache: Cache | None) -> Tensor:
        """Return what is added to the logits, [1 or B, 1 or H, N, M], in the type of q.

        q [B, H, N, D] are the last N of the tokens k [B, G, M, D], as the score prepared them. x [B, N, H·D] is the
        layer's input if the class `needs_input`, and a cache holds what was appended for the tokens before.
        """
        raise NotImplementedError

    def reference(self, logits: Tensor, x: Tensor | None) -> Tensor:
        """Return the changed logits [B, H, N, M] by the plain formula."""
        raise NotImplementedError


class Output(Component):
    """What happens to the output of each head, before the host joins the heads."""

    axis = "output"
    dropout = compares = True

    def forward(
        self,
        normalizer: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor | None,
        cache: Cache | None,
        **how: Any,
    ) -> Any:
        """Return what `normalizer` returns, its output changed; arguments as in `Mechanism` and `Normalizer`."""
        found = normalizer(q, k, v, **how)
        if how.get("need_weights"):
            return self.change(found[0], v, x), *found[1:]
        return self.change(found, v, x)

    def change(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        """Return the changed output [B, H, N, Dv].

        v [B, G, M, Dv] are the values, a head for H/G query heads; x [B, N, H·D] is the layer's input if the class
        `needs_input`.
        """
        raise NotImplementedError

    def reference(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        """Return the changed output [B, H, N, Dv] by the plain formula; v is [B, H, M, Dv]."""
        raise NotImplementedError


class Family(Component):
    """A mechanism that never forms the N×M weights and is therefore not combined.

    Masks reach it as a key mask only.
    """

    axis = "family"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, is_causal: bool, cache: Cache | None = None
    ) -> Tensor:
        """Return the output [B, H, N, D]; `is_causal` means that query i sees keys j ≤ i + M − N.

        A family that is not declared `cached` need not take `cache`.

        Args:
            q: [B, H, N, D], k: [B, H, M, Dk] and v: [B, H, M, D].
            key_mask: None, boolean (True = visible) or additive (−inf hides), [B or 1, M].
            cache: the layer's state while decoding. q, k, v and `key_mask` are only the N new tokens then, which follow
                those in the cache, and `is_causal` is True. Extend the state; `Mechanism` changes ``cache.tokens``.
        """
        raise NotImplementedError

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, bias: Tensor, is_causal: bool) -> Tensor:
        """Return the output [B, H, N, D] by the plain formula.

        `seen` [B, 1, N, M] says where a query sees a key. `bias` [B, 1, 1, M] is what an additive mask adds to the
        logarithm of a key's weight; 0 for hidden keys.
        """
        raise NotImplementedError
