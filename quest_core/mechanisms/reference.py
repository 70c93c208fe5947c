"""Unit vectors, masks and normalisers that implementations are compared with: plain formulas, written to be read.

Nothing here is fast and nothing here is shared with the implementations it checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x̄ = x / ‖x‖₂ over the last axis; zero stays zero."""
    norm = x.pow(2).sum(-1, keepdim=True).sqrt()
    return torch.where(norm > 0, x / torch.where(norm > 0, norm, 1), 0)


def visible(n: int, m: int, mask: Tensor | None, is_causal: bool) -> Tensor:
    """[N, M] or wider, True where query i sees key j; causal means j ≤ i + M − N."""
    seen = torch.ones(n, m, dtype=torch.bool)
    if is_causal:
        i, j = torch.arange(n)[:, None], torch.arange(m)
        seen = j <= i + m - n
    if mask is None:
        return seen
    return seen & (mask if mask.dtype == torch.bool else mask > -math.inf)


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """exp(l) / Σ exp(l) over the visible keys; a row that sees nothing gives zeros."""
    shifted = torch.where(seen, logits, -math.inf)
    top = shifted.amax(-1, keepdim=True)
    weight = torch.where(seen, (shifted - torch.where(top > -math.inf, top, 0)).exp(), 0)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / torch.where(total > 0, total, 1), 0)


def sigmoid(logits: Tensor, seen: Tensor, bias: float | None = None) -> Tensor:
    """σ(l + b) of the visible keys; b = −log of how many the row sees, unless given (Your Attention Matters, eq. 5)."""
    seen = seen.expand(logits.shape)
    count = seen.sum(-1, keepdim=True)
    shift = -torch.where(count > 0, count, 1).double().log() if bias is None else bias
    return torch.where(seen, 1 / (1 + (-torch.where(seen, logits + shift, 0)).exp()), 0)


def sinkhorn(logits: Tensor, seen: Tensor, iterations: int = 3, eps: float = 1.0) -> Tensor:
    """exp(l/ε), then rows to sum 1 and columns to sum N/M in turn (Your Attention Matters, eq. 7).

    N counts the rows that see a key, M the columns that a row sees; the others have no mass.
    """
    seen = seen.expand(logits.shape)
    weight = softmax(logits / eps, seen)  # the first half-step, in the only form that cannot overflow
    rows = seen.any(-1).sum(-1)[..., None, None].double()
    columns = seen.any(-2).sum(-1)[..., None, None].double()
    for step in range(2, iterations + 1):
        total = weight.sum(-2 if step % 2 == 0 else -1, keepdim=True)
        wanted = rows / columns if step % 2 == 0 else 1
        weight = torch.where(total > 0, weight / torch.where(total > 0, total, 1) * wanted, 0)
    return weight


NORMALISERS: Mapping[str, Callable[..., Tensor]] = {"softmax": softmax, "sigmoid": sigmoid, "sinkhorn": sinkhorn}
