"""A mechanism computed by the references that its parts declare, in place of their modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanism import Mechanism
from ..mechanisms import reference
from ..mechanisms.base import Dims
from ..mechanisms.part import Part


def missing(mechanism: Mechanism) -> list[str]:
    """Return the names of the parts of `mechanism` that have no reference and cannot do without one.

    A grouping without a reference is computed by its own `assign`.
    """
    return [
        part.name
        for part in mechanism.config.specs()
        if part.reference is None and (part.axis != "grouping" or mechanism.grouping.needs_weights)
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
    by_axis = {part.axis: part for part in mechanism.config.specs()}
    if mechanism.family is not None:
        key_mask = None if attn_mask is None else attn_mask[:, 0, 0]  # [B or 1, M]
        out: Tensor = _call(by_axis["family"], mechanism.family, mechanism, q, k, v, key_mask, is_causal)
        return out, None, None
    heads = q.shape[1]
    head = torch.arange(heads) * k.shape[1] // heads  # the key/value head of each query head
    own = mechanism.grouping.assign(k, heads, attn_mask)
    if by_axis["grouping"].reference is not None:
        own = _call(by_axis["grouping"], mechanism.grouping, mechanism, k, heads, attn_mask)
    head = head if own is None else own
    logits: Tensor = _call(by_axis["score"], mechanism.score, mechanism, q, k[:, head], head=head)
    logits = logits if residual is None else logits + residual
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.double()
    seen = reference.visible(q.shape[2], k.shape[2], attn_mask, is_causal).expand(logits.shape)
    weights: Tensor = _call(by_axis["normaliser"], mechanism.normaliser, mechanism, logits, seen)
    return weights @ v[:, head], weights, logits


def _call(part: Part, module: nn.Module, mechanism: Mechanism, *tensors: Any, head: Tensor | None = None) -> Any:
    """The reference of `part` of some tensors, and of what else it names: options, sizes, parameters and buffers."""
    assert part.reference is not None
    names = inspect.signature(part.reference).parameters
    known: dict[str, Any] = {} if mechanism.dims is None else dict(vars(mechanism.dims))
    known |= mechanism.config.build_arguments(part)
    shared = _key_heads(part, module, mechanism) if head is not None else {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        x = x.detach().double() if x.is_floating_point() else x
        axis = shared.get(name)
        known[name] = x if axis is None or head is None else x.index_select(axis, head)
    if part.axis == "family":
        *tensors_only, known["key_mask"], known["is_causal"] = tensors
        return part.reference(*tensors_only, **{name: x for name, x in known.items() if name in names})
    return part.reference(*tensors, **{name: x for name, x in known.items() if name in names})


def _key_heads(part: Part, module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """The axis of each parameter that counts key/value heads: it doubles if they do, and the query heads do not."""
    dims = mechanism.dims
    if dims is None:
        return {}
    with torch.device("meta"):
        wide = part.build(
            Dims(dims.num_heads, 2 * dims.kv_heads, dims.head_dim), **mechanism.config.build_arguments(part)
        )
    return {
        name: axis
        for name, x in wide.named_parameters()
        for axis, size in enumerate(x.shape)
        if size != module.get_parameter(name).shape[axis]
    }
