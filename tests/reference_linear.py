"""The truth for linear and cosine attention: float64, one weight a pair of tokens, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from quest_core.mechanisms.reference import unit, visible


def linear(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), φ(x) = elu(x) + 1 (Your Attention Matters, eq. 6).

    Args:
        q: [B, H, N, D], k: [B, H, M, D], v: [B, H, M, Dv].
        key_mask: [B, M], boolean (True = visible) or additive: a key's weight is multiplied by exp of it, −inf hides.
        is_causal: query i sees keys j ≤ i + M − N.

    Returns:
        [B, H, N, Dv]; zeros for a query that sees no key.
    """
    weight = _feature(q.double()) @ _feature(k.double()).mT
    weight = torch.where(_seen(q, k, key_mask, is_causal), weight * _factor(key_mask), 0)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / torch.where(total > 0, total, 1), 0) @ v.double()


def cosine(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, *, key_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Σ_j cos(q_i, k_j) v_j / n_i^σ(m_h), n_i the keys that i sees (Cottention; Your Attention Matters, eq. 11).

    Arguments as in `linear`, and m: [H, 1, 1].
    """
    seen = _seen(q, k, key_mask, is_causal)
    weight = torch.where(seen, unit(q.double()) @ unit(k.double()).mT * _factor(key_mask), 0)
    count = seen.sum(-1, keepdim=True).double()
    power = 1 / (1 + (-m.double()).exp())
    return weight @ v.double() / torch.where(count > 0, count, 1) ** power


def _feature(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, exp(x) below."""
    return torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp())


def _factor(key_mask: Tensor | None) -> Tensor:
    """What an additive mask multiplies the weights by, [B, 1, 1, M] or 1."""
    if key_mask is None or key_mask.dtype == torch.bool:
        return torch.ones(())
    return key_mask.double().exp()[:, None, None, :]


def _seen(q: Tensor, k: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
    """[B, H, N, M]."""
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return visible(q.shape[-2], k.shape[-2], mask, is_causal).expand(*q.shape[:-1], k.shape[-2])
