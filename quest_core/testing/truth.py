"""A mechanism computed by the references of its components, in place of their modules."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..config import AttentionConfig
from ..mechanism import Mechanism
from ..mechanisms.base import Family, Grouping, Normalizer, Output, Score, ScoreMod
from ..mechanisms.naive import is_hidden, visible


def missing(config: AttentionConfig) -> list[str]:
    """Return the names of the components of an attention that have no reference."""
    bases = [base.reference for base in (Score, Normalizer, Grouping, ScoreMod, Output, Family)]
    return [part.name for part in config.components if getattr(part, "reference", None) in bases]


def truth(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0,
    residual: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output [B, H, N, Dv], the weights and the logits [B, H, N, M], in the dtype of q.

    Weights and logits are None for a family. Arguments as in `Mechanism.forward_with_logits`; dropout is left
    out. No component may be `missing`, and the parameters of `mechanism` must have the dtype of q.
    """
    (batch, heads, n, _), (groups, m) = q.shape, k.shape[1:3]
    seen = visible(n, m, attn_mask, is_causal).expand(batch, 1 if mechanism.family is not None else heads, n, m)
    bias = q.new_zeros(1, 1, 1, 1)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = attn_mask.masked_fill(is_hidden(attn_mask), 0).to(q.dtype)
    if 0 in (*q.shape, *k.shape, *v.shape):
        unused = sum(x.sum() for x in (q, k, v, *mechanism.parameters()))
        weights = q.new_zeros(batch, heads, n, m)
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * unused, weights, weights
    if mechanism.family is not None:
        return mechanism.family.reference(q, k, v, seen=seen, bias=bias, is_causal=is_causal), None, None
    head = mechanism.grouping.reference(k, heads, seen)
    logits = mechanism.score.reference(q, k, v, head=head, seen=seen)
    logits = logits if residual is None else logits + residual
    if (score_mod := getattr(mechanism, "score_mod", None)) is not None:
        logits = score_mod.reference(logits, x)
    logits = logits + bias
    weights = mechanism.normalizer.reference(logits, seen)
    if mechanism.grouping.needs_weights:
        weights = mechanism.grouping.reference_weights(weights, groups, seen)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits.masked_fill(is_hidden(attn_mask), -math.inf)
    out = weights @ v[:, head]
    if (output := getattr(mechanism, "output", None)) is not None:
        out = output.reference(out, v[:, head], x)
    return out, weights, logits


def exact(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any, Any]:
    """Return `truth` in float64, of a mechanism and tensors in any dtype."""
    if (mask := options.get("attn_mask")) is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.double().masked_fill(is_hidden(mask), -math.inf)
    if (x := options.get("x")) is not None:
        options["x"] = x.double()
    wide = all(x.dtype == torch.float64 for x in mechanism.parameters())
    mechanism = mechanism if wide else copy.deepcopy(mechanism).double()
    return truth(mechanism, q.double(), k.double(), v.double(), **options)


@contextmanager
def use_truth(mechanisms: Iterable[Mechanism]) -> Iterator[None]:
    """Inside the block these mechanisms, with no part `missing`, compute by their references; dropout is left out."""
    with ExitStack() as changes:
        for mechanism in mechanisms:
            places: list[tuple[Any, str, Callable[..., Any]]] = [
                (mechanism, "forward", functools.partial(_output, mechanism)),
                (mechanism, "forward_with_logits", functools.partial(truth, mechanism)),
            ]
            if mechanism.family is None:
                normalizer = mechanism.normalizer
                places += [
                    (mechanism, "logits", functools.partial(_logits, mechanism.score)),
                    (normalizer, "forward", functools.partial(Normalizer.forward, normalizer)),
                    (normalizer, "weights", functools.partial(_weights, normalizer)),
                ]
            for place in places:
                changes.enter_context(mock.patch.object(*place))
        yield


def _output(mechanism: Mechanism, *tensors: Tensor, unit_keys: bool = False, **options: Any) -> Tensor:
    if unit_keys:  # normalized again, which changes nothing
        assert torch.allclose(tensors[1].norm(dim=-1), tensors[1].new_ones(()))
    return truth(mechanism, *tensors, **options)[0]


def _logits(score: Score, q: Tensor, k: Tensor) -> Tensor:
    head = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
    return score.reference(q, k, k, head=head, seen=seen)


def _weights(normalizer: Normalizer, logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.masked_fill(is_hidden(mask), 0)
    return normalizer.reference(logits, visible(logits.shape[-2], logits.shape[-1], mask, False).expand(logits.shape))
