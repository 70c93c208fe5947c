"""Elliptical scores: features along which values move from layer to layer count more.

Each layer needs the values of the layer before it, in the same forward pass. `quest_core.inject` and :func:`chain` set
the layer before; without it a layer raises UnsupportedError.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cache import Cache
from ..compat import is_compiling, is_eager, is_recomputing, no_autocast, wider
from ..errors import UnsupportedError
from ..ops import unit, visible
from ..registry import register
from . import naive
from .base import Dims, Score
from .scores import SCALE, STARTS, Standard

Reorder: TypeAlias = Callable[[Tensor], Tensor]


@register("elliptical", source="Elliptical Attention, NeurIPS 2024", options=(SCALE,))
class Elliptical(Standard):
    """(q ⊙ m) kᵀ / √D.

    m says how much each feature of the values has changed since the last layer: the mean over the keys that the query
    sees of abs(v − v of the previous layer), divided by its largest feature; when nothing has changed it is 1. No
    gradient flows through it. A cache keeps the change of every token.
    The first layer of a chain is standard; so is the first of a stage, whose values differ in shape from those before.
    Where a model runs a stack several times, each time begins a chain. Values must be as wide as queries.

    Values are handed over once, within one forward pass and one thread. Memory is O(N + M); under a mask that differs
    between queries the mean takes O(N·M), a weight per pair.
    """

    causal = cross = cached = chained = stops_gradient = True
    reads = ("tokens",)

    def __init__(self, dims: Dims | None, *, scale: float | None = None) -> None:
        super().__init__(dims, scale=scale)
        # In a tuple, so that the previous layer is not registered as a part of this one.
        self._previous: tuple[Elliptical | None] | None = None
        self._next: tuple[Elliptical, ...] = ()
        self._values: dict[int, Tensor] = {}  # thread -> [B, G, M, D], until the next layer takes them
        self._order: tuple[Reorder, Reorder] | None = None
        # Own values and those before [B, G, M, D] of the latest forward pass, which checkpointing may repeat; empty
        # from its backward pass on.
        self._step: list[Tensor] = []

    def follow(self, previous: "Elliptical | None") -> None:
        """Set the layer before this one; None makes it the first."""
        for earlier in self._previous or ():
            if earlier is not None and self in earlier._next:
                earlier._next = ()
        self._previous = (previous,)
        if previous is not None:
            previous._next = (self,)

    @contextmanager
    def token_order(self, *, to_tokens: Reorder, from_tokens: Reorder) -> Iterator[None]:
        """Compare tokens in an order that all layers share, for calls inside the block.

        Needed where the host sorts tokens or cuts them into windows in every layer, so that each token is compared with
        itself.

        Args:
            to_tokens: values as this layer is called with, [B, G, M, D], to an order that all layers share, of any
                shape; another number of tokens, heads or features there means a stage's border.
            from_tokens: the inverse; tokens may appear more than once, and padding may hold any of them.
        """
        self._order = (to_tokens, from_tokens)
        try:
            yield
        finally:
            self._order = None

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
        **how: Any,
    ) -> tuple[Tensor, Tensor, float]:
        if v.shape[-1] != q.shape[-1]:
            raise UnsupportedError(
                f"elliptical attention weighs the features of queries by those of values; expected values of "
                f"{q.shape[-1]} features, found {v.shape[-1]}"
            )
        before = self.hand_over(v)
        if before is not None:
            change = (v.detach() - before).abs()  # [B, G, M, D]
            change = change if cache is None else cache.append("elliptical_change", change)
            spread = head
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:  # query heads see different keys
                change, spread = _spread(change, q.shape[1], head), None
            metric = _metric(change.to(wider(v.dtype)), q.shape[2], mask, is_causal)  # [B, G or H, N or 1, D]
            q = q * _spread(metric.to(q.dtype), q.shape[1], spread)
        if is_eager() and q.requires_grad and self._step and not is_recomputing():
            step = self._step
            q.register_hook(lambda _: step.clear())
        return super().forward(q, k, v, mask=mask, is_causal=is_causal, head=head, cache=cache, **how)

    def hand_over(self, v: Tensor) -> Tensor | None:
        """Return the values of the layer before [B, G, M, D], in the order of `v`, and keep `v` for the next layer.

        None in the first layer of a chain or of a stage; UnsupportedError if the layer before has left no values.
        """
        v = v.detach()
        if self._previous is None:
            raise UnsupportedError(
                "elliptical attention needs the values of the layer before it, and that layer is unknown; "
                "use quest_core.inject, or call quest_core.chain(model) on a model of your own"
            )
        (previous,) = self._previous
        kept = v if self._order is None else self._order[0](v)
        if not is_recomputing():
            before = self._take(previous, kept)
        elif previous is None:
            before = None
        elif self._step and _alike(self._step[0], kept):  # a GPU recomputes in another thread, and may round otherwise
            before, self._step = self._step[1], []
        else:
            raise UnsupportedError(
                "elliptical attention cannot compute this layer again: the values of its forward pass are gone; "
                "call backward once, before the next forward pass, or leave out activation checkpointing"
            )
        if before is None or before.shape != kept.shape:
            return None
        return before if self._order is None else self._order[1](before)

    def _take(self, previous: "Elliptical | None", kept: Tensor) -> Tensor | None:
        """Return the values that `previous` has left in this forward pass, and leave `kept` for the next layer."""
        thread, before = 0 if is_compiling() else threading.get_ident(), None
        if previous is None:  # a forward pass begins, so values of one that ended early are out of date
            layer = self
            while layer._next:
                (layer,) = layer._next
                layer._values.pop(thread, None)
        else:
            before = previous._values.pop(thread, None)
            if before is None:
                raise UnsupportedError(
                    "elliptical attention found no values of the layer before it in this forward pass: that layer was "
                    "skipped, or only this one was copied; run all layers, and call quest_core.chain(model) after "
                    "copying layers"
                )
            if is_eager() and (self.training or torch.is_grad_enabled()):
                self._step = [kept, before]
        if self._next:
            self._values[thread] = kept
        return before

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        before = self.hand_over(v)
        if before is not None:
            change = (v.detach() - before).abs()[:, head]  # [B, H, M, D]
            count = seen.sum(-1, keepdim=True).clamp(min=1)
            mean = seen.to(change.dtype) @ change / count  # [B, H, N, D]
            top = mean.amax(-1, keepdim=True)
            q = q * torch.where(top > 0, naive.ratio(mean, top), 1)
        return super().reference(q, k, v, head=head, seen=seen)

    def __getstate__(self) -> dict[str, Any]:
        # No copy needs what belongs to one forward pass.
        return {**self.__dict__, "_values": {}, "_step": []}


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding: their difference is below √ε of the largest entry."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device) or one.numel() == 0:
        return one.shape == other.shape
    close = torch.finfo(one.dtype).eps ** 0.5
    one, other = (x.float().nan_to_num(0, 0, 0) for x in (one, other))  # a step that overflows is repeated too
    return bool((one - other).abs().amax() <= close * one.abs().amax())


def _spread(x: Tensor, heads: int, head: Tensor | None) -> Tensor:
    """Return `x` [B, G, N, D] with a key/value head per query head, [B, H, N, D]; `head` as in `Score.forward`."""
    if head is None:
        return x.repeat_interleave(heads // x.shape[1], 1) if heads != x.shape[1] else x
    return x.index_select(1, head)


def _metric(change: Tensor, n: int, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return m [B, G, N, D], or [B, G, 1, D] if all `n` queries see the same keys, from the change [B, G, M, D].

    G is H if the mask differs between heads.
    """
    m = change.shape[2]
    if m == 0:
        return change.new_ones(*change.shape[:2], 1, 1)
    seen = None if mask is None else visible(mask).to(change.dtype)  # [B or 1, G or 1, N or 1, M or 1]
    if seen is not None and seen.shape[2] != 1:
        seen = seen.expand(*seen.shape[:3], m)
        seen = seen.tril(m - n) if is_causal else seen
        with no_autocast(change.device.type):
            # In this order, or ONNX Runtime takes the sizes of 1 of `seen` for those of the result.
            total = torch.einsum("bhmd,bhnm->bhnd", change, seen)
    else:
        shown = change if seen is None else change * seen.mT
        if is_causal and n > 1:
            # Query i sees keys up to i + M − N; earlier ones see none, and then any metric does.
            last = (torch.arange(n, device=change.device) + m - n).clamp(min=0)
            total = shown.cumsum(2)[:, :, last]
        else:
            total = shown.sum(2, keepdim=True)
    top = total.amax(-1, keepdim=True)  # the number of keys cancels in the ratio of means
    return torch.where(top > 0, total / top, 1)  # without a gradient, which 0/0 would spoil


@register("elliptical-quest", source="QUEST, A.5.2", options=STARTS)
class EllipticalQuest(Elliptical):
    """(q ⊙ m) k̄ᵀ.

    In the paper S q̄ M k̄ᵀ with S = diag(‖q‖). The first layer of a chain is quest.
    """

    unit_keys = True
    factor = 1
    key = staticmethod(unit)  # type: ignore[assignment]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return super().reference(q, naive.unit(k), v, head=head, seen=seen)


def stack_of(path: str) -> str:
    """Return the stack that a layer belongs to: its path, with each number replaced by *."""
    return re.sub(r"\d+", "*", path)


def refuse_repeated(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise UnsupportedError if one of `layers` has several places in a stack of `model`, so that it follows two."""
    wanted, places = set(layers), dict[tuple[nn.Module, str], str]()
    for path, module in model.named_modules(remove_duplicate=False):
        if module in wanted and (first := places.setdefault((module, stack_of(path)), path)) != path:
            raise UnsupportedError(
                f"'{first}' and '{path}' are one layer, which would have to follow two others; give each place a layer "
                "of its own"
            )


def chain(model: nn.Module, stacks: Mapping[str, str] | None = None) -> None:
    """Connect every layer of `model` that reads values of the layer before it (elliptical) to that layer.

    Layers follow each other within a stack: paths that differ in numbers only, such as ``encoder.layers.0.attn`` and
    ``encoder.layers.1.attn``. `quest_core.inject` does this; call it for a model built of `quest_core.Attention`.

    Args:
        model: a model with quest_core attention in it.
        stacks: the path of each attention module, in the order of the forward pass, and the stack that it belongs to;
            by default those of ``model.named_modules()``.

    Raises:
        UnsupportedError: a layer has several places in one stack.
    """
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, Score))
    scores: dict[str, Any] = {name: score for name, score in found if hasattr(score, "follow")}
    refuse_repeated(model, scores.values())
    latest: dict[str, Score] = {}
    for path, stack in ({name: stack_of(name) for name in scores} if stacks is None else stacks).items():
        for name, score in scores.items():
            if f"{name}.".startswith(f"{path}."):
                score.follow(latest.get(stack))
                latest[stack] = score
