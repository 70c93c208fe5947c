"""Every score with every normaliser in float64: plain formulas, written to be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quest_core.mechanisms.reference import NORMALISERS, unit, visible


def standard(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ / √D."""
    return q @ k.mT / math.sqrt(q.shape[-1])


def quest(q: Tensor, k: Tensor) -> Tensor:
    """q k̄ᵀ (QUEST, section 2.1)."""
    return q @ unit(k).mT


def qnorm(q: Tensor, k: Tensor) -> Tensor:
    """q̄ kᵀ (QUEST, table 1)."""
    return unit(q) @ k.mT


def qknorm_hs(q: Tensor, k: Tensor, log_scale: Tensor, cap: float = 100.0) -> Tensor:
    """C_h · q̄ k̄ᵀ with C = exp(log_scale), at most `cap` (QUEST, table 1; Swin v2)."""
    return log_scale.exp().clamp(max=cap) * (unit(q) @ unit(k).mT)


def qknorm(q: Tensor, k: Tensor, query_scale: Tensor, key_scale: Tensor) -> Tensor:
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ (QUEST, table 1; shared by heads: ViT-22B)."""
    return (query_scale * unit(q)) @ (key_scale * unit(k)).mT


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
    logits = SCORES[score](q, k, **{name: p.double() for name, p in (parameters or {}).items()})
    if scale is not None:
        logits = logits * scale * (math.sqrt(q.shape[-1]) if score == "standard" else 1)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.double()
    seen = visible(q.shape[-2], k.shape[-2], mask, is_causal)
    weights = NORMALISERS[normaliser](logits, seen, **(normaliser_options or {}))
    return weights @ v, weights
