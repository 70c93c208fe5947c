"""Plain formulas that several references share, in the dtype of their inputs; the fast paths use none of them."""

import math

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """Return x / ‖x‖₂ over the last axis; a zero vector stays zero and has a zero gradient."""
    square = x.square().sum(-1, keepdim=True)
    return torch.where(square > 0, x / torch.where(square > 0, square, 1).sqrt(), torch.zeros_like(x))


def is_hidden(mask: Tensor) -> Tensor:
    """Return where a mask hides: False, −inf, or at most half of the dtype's minimum."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def visible(n: int, m: int, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return [N, M] or wider, True where query i sees key j; `is_causal` means j ≤ i + M − N."""
    seen = torch.ones(n, m, dtype=torch.bool)
    seen = seen.tril(m - n) if is_causal else seen
    return seen if mask is None else seen & ~is_hidden(mask)


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Return exp(l) / Σ exp(l) over the visible keys; zeros in a row that sees none."""
    blind = ~seen.any(-1, keepdim=True)
    top = logits.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True).masked_fill(blind, 0)
    weights = (logits - top).masked_fill(~seen, -math.inf).exp()
    return weights / weights.sum(-1, keepdim=True).masked_fill(blind, 1)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and a where b is not positive."""
    return a / torch.where(b > 0, b, 1)
