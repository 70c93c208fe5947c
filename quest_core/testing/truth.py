"""A mechanism computed by the references that its parts declare, in place of their modules."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanism import Mechanism
from ..mechanisms.base import (
    Dims,
    Normalizer,
)
from ..registry import Component
from .references import reference_of, visible


def missing(mechanism: Mechanism) -> list[str]:
    """Return the names of the parts of `mechanism` that have no reference and cannot do without one.

    A grouping without a reference is computed by its own `assign`.
    """
    return [
        part.name
        for part in mechanism.config.components
        if reference_of(part) is None and (part.axis != "grouping" or mechanism.grouping.needs_weights)
    ]


def truth(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output [B, H, N, Dv], the weights and the logits [B, H, N, M], in float64.

    Weights and logits are None for a family. Arguments as in `Mechanism.forward_with_logits`, with no part `missing`.
    """
    q, k, v = q.double(), k.double(), v.double()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        hides = attn_mask <= torch.finfo(attn_mask.dtype).min / 2
        attn_mask = attn_mask.double().masked_fill(hides, -math.inf)
    by_axis = {part.axis: part for part in mechanism.config.components}
    n, m, heads = q.shape[2], k.shape[2], q.shape[1]
    seen = visible(n, m, attn_mask, is_causal)
    if mechanism.family is not None:
        key_mask = None if attn_mask is None else attn_mask[:, 0, 0]  # [B or 1, M]
        given: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "seen": seen}
        out: Tensor = _call(by_axis["family"], mechanism.family, mechanism, q, k, v, **given)
        return out, None, None
    grouping, shared = mechanism.grouping, by_axis["grouping"]
    head = torch.arange(heads) * k.shape[1] // heads  # the key/value head of each query head
    if reference_of(shared) is None:
        own = grouping(k, heads, attn_mask) if grouping.chooses else None
        head = head if own is None else own
    elif not grouping.needs_weights:
        head = _call(shared, grouping, mechanism, k, heads, attn_mask)
    score: Any = mechanism.score
    given = {"v": v[:, head], "mask": attn_mask, "is_causal": is_causal}
    if by_axis["score"].chained:
        before, _ = score.hand_over(v.detach())
        given["before"] = None if before is None else before[:, head]
    logits: Tensor = _call(by_axis["score"], score, mechanism, q, k[:, head], head=head, **given)
    logits = logits if residual is None else logits + residual
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.double()
    seen = seen.expand(logits.shape)
    weights: Tensor = _call(by_axis["normalizer"], mechanism.normalizer, mechanism, logits, seen)
    if grouping.needs_weights:
        weights = _call(shared, grouping, mechanism, weights, seen)
    return weights @ v[:, head], weights, logits


@contextmanager
def computed_by_truth(mechanisms: Iterable[Mechanism]) -> Iterator[None]:
    """Inside the block these mechanisms, with no part `missing`, compute by their references; dropout is left out."""
    changed: list[tuple[Mechanism, Any]] = []
    try:
        for mechanism in mechanisms:
            own = copy.copy(mechanism)
            own._modules = dict(mechanism._modules)  # a shallow copy shares them
            changed.append((mechanism, own._modules.get("normalizer")))
            methods = _Methods(own)
            mechanism.forward = methods.forward  # type: ignore[method-assign]
            mechanism.forward_with_logits = methods.forward_with_logits  # type: ignore[method-assign]
            if mechanism.family is None:
                mechanism.logits = methods.logits  # type: ignore[method-assign]
                mechanism.normalizer = methods.normalizer
        yield
    finally:
        for mechanism, normalizer in changed:
            for name in ("forward", "forward_with_logits", "logits"):
                vars(mechanism).pop(name, None)
            if normalizer is not None:
                mechanism.normalizer = normalizer


class _Methods:
    """What a host may call of a mechanism, by reference."""

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.normalizer = _Weights(mechanism)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, unit_keys: bool = False, **options: Any) -> Tensor:
        if unit_keys:  # normalized again, which changes nothing
            assert torch.allclose(k.norm(dim=-1), k.new_ones(()))
        return self.forward_with_logits(q, k, v, **options)[0]

    def forward_with_logits(
        self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any
    ) -> tuple[Tensor, Any, Any]:
        out, weights, logits = truth(self.mechanism, q, k, v, **options)
        return out.to(q.dtype), weights, logits

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        head = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
        score = next(part for part in self.mechanism.config.components if part.axis == "score")
        out: Tensor = _call(score, self.mechanism.score, self.mechanism, q, k[:, head], head=head)
        return out


class _Weights(Normalizer):
    """The normalizer of a mechanism by reference."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__(None)
        self.mechanism = (mechanism,)  # not a submodule, because it holds this one

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        (mechanism,) = self.mechanism
        part = next(part for part in mechanism.config.components if part.axis == "normalizer")
        if mask is not None and mask.dtype != torch.bool:
            logits = logits + mask
        seen = visible(logits.shape[-2], logits.shape[-1], mask, False).expand(logits.shape)
        weights: Tensor = _call(part, mechanism.normalizer, mechanism, logits, seen)
        return weights


def _call(
    part: type[Component],
    module: nn.Module,
    mechanism: Mechanism,
    *tensors: Any,
    head: Tensor | None = None,
    **given: Any,
) -> Any:
    """The reference of `part` of some tensors, and of what else it names: what is `given`, options, sizes, parameters
    and buffers."""
    reference = reference_of(part)
    assert reference is not None
    known = {"training": module.training, **given}
    if mechanism.dims is not None:
        known |= vars(mechanism.dims)
    given_options = dict(mechanism.config.options)
    known |= {o.name: given_options.get(o.name, o.default) for o in part.options}
    shared = _key_heads(part, module, mechanism) if head is not None else {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        x = x.double() if x.is_floating_point() else x
        axis = shared.get(name)
        known[name] = x if axis is None or head is None else x.index_select(axis, head)
    named = list(inspect.signature(reference).parameters)[len(tensors) :]
    return reference(*tensors, **{name: known[name] for name in named if name in known})


def _key_heads(part: type[Component], module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """The axis of each parameter that counts key/value heads: it doubles if they do, and the query heads do not."""
    dims = mechanism.dims
    if dims is None:
        return {}
    with torch.device("meta"):
        wide = mechanism.config.build(part, Dims(dims.num_heads, 2 * dims.kv_heads, dims.head_dim))
    return {
        name: axis
        for name, x in wide.named_parameters()
        for axis, size in enumerate(x.shape)
        if size != module.get_parameter(name).shape[axis]
    }
