"""The truth that everything else is compared with: plain formulas, float64, written to be read.

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


def standard(q: Tensor, k: Tensor, scale: float | None = None, standard_scale: float | None = None) -> Tensor:
    """q kᵀ / √D, or times `scale`, or times the host's own `standard_scale`."""
    factor = 1 / math.sqrt(q.shape[-1]) if standard_scale is None else standard_scale
    return q @ k.mT * (factor if scale is None else scale)


def quest(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q k̄ᵀ (QUEST, section 2.1)."""
    return q @ unit(k).mT * (1 if scale is None else scale)


def qnorm(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q̄ kᵀ (QUEST, table 1)."""
    return unit(q) @ k.mT * (1 if scale is None else scale)


def qknorm_hs(q: Tensor, k: Tensor, log_scale: Tensor, cap: float = 100.0, scale: float | None = None) -> Tensor:
    """C_h · q̄ k̄ᵀ with C = exp(log_scale), at most `cap` (QUEST, table 1; Swin v2)."""
    return log_scale.exp().clamp(max=cap) * (unit(q) @ unit(k).mT) * (1 if scale is None else scale)


def qknorm(q: Tensor, k: Tensor, query_scale: Tensor, key_scale: Tensor, scale: float | None = None) -> Tensor:
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ (QUEST, table 1; shared by heads: ViT-22B)."""
    return (query_scale * unit(q)) @ (key_scale * unit(k)).mT * (1 if scale is None else scale)


SCORES: Mapping[str, Callable[..., Tensor]] = {
    "standard": standard,
    "quest": quest,
    "qnorm": qnorm,
    "qknorm-hs": qknorm_hs,
    "qknorm-ds": qknorm,
    "qknorm": qknorm,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: str = "standard",
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    normaliser: str = "softmax",
    normaliser_options: Mapping[str, float | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64: q [B, H, N, D], k and v [B, G, M, D] -> output [B, H, N, Dv], weights [B, H, N, M].

    Args:
        score: a name of SCORES.
        parameters: the score's learnable tensors by name, per key/value head already repeated to H heads.
        scale: replaces 1/√D of standard and multiplies the logits of the others.
        normaliser: a name of NORMALISERS.
        normaliser_options: the normaliser's options by name.
    """
    q, k, v = q.double(), k.double(), v.double()
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = SCORES[score](q, k, **{name: p.double() for name, p in (parameters or {}).items()}, scale=scale)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.double()
    seen = visible(q.shape[-2], k.shape[-2], mask, is_causal)
    weights = NORMALISERS[normaliser](logits, seen, **(normaliser_options or {}))
    return weights @ v, weights
