"""The truth that the attention-free family is compared with: plain formulas in float64, written to be read.

[A] is An Attention Free Transformer, arXiv 2105.14103. Everything is broadcast over [B, T, T', d], which no
implementation may do.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def weighted_average(k: Tensor, v: Tensor, w: Tensor | None, seen: Tensor) -> Tensor:
    """Σ_t' exp(K_t' + w_tt') V_t' / Σ_t' exp(K_t' + w_tt'): equation 2 without its gate; equation 5 without w.

    Args:
        k: [B, T', d], a bias of the mask included.
        v: [B, T', d].
        w: [T, T'] or, with biases that differ from feature to feature, [T, T', d].
        seen: [B or 1, T, T'], True where query t may use key t'; a query that sees nothing gets zeros.
    """
    k, v = k.double(), v.double()
    logits = k[:, None, :, :].expand(-1, seen.shape[1], -1, -1)  # [B, T, T', d]
    if w is not None:
        logits = logits + (w.double() if w.dim() == 3 else w.double()[:, :, None])
    logits = torch.where(seen[..., None], logits, -math.inf)
    top = logits.amax(2, keepdim=True)
    weight = (logits - torch.where(top > -math.inf, top, 0)).exp()
    total = weight.sum(2, keepdim=True)
    weight = torch.where(total > 0, weight / torch.where(total > 0, total, 1), 0)
    return (weight * v[:, None, :, :]).sum(2)  # [B, T, d]


def aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, seen: Tensor, query: bool = True) -> Tensor:
    """σ(Q) ⊙ the weighted average (equations 2 and 5): q [B, T, d], the rest as in `weighted_average`."""
    y = weighted_average(k, v, w, seen)
    return torch.sigmoid(q.double()) * y if query else y


def factored(u: Tensor, v: Tensor) -> Tensor:
    """w_tt' = u_tᵀ v_t' (equation 7): u [T, r], v [T', r] -> [T, T']."""
    return u.double() @ v.double().T


def local(w: Tensor, window: int, first: int = 0) -> Tensor:
    """w where |t − t'| < s, 0 elsewhere (equation 4): w [T, T'], its first query at position `first`."""
    out = torch.zeros_like(w)
    for t, other in itertools.product(range(w.shape[0]), range(w.shape[1])):
        if abs(t + first - other) < window:
            out[t, other] = w[t, other]
    return out


def reparameterised(w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """γ (w − mean(w)) / std(w) + β for each head (equation 8): w [h, s, ...], γ and β [h]."""
    heads = []
    for one, gamma, beta in zip(w.double(), gain.double(), shift.double(), strict=True):
        centred = one - one.mean()
        deviation = centred.square().mean().sqrt()
        heads.append(gamma * (centred / deviation if deviation > 0 else centred) + beta)
    return torch.stack(heads)


def conv_bias(w: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """The w_tt' that equation 6 means: w[i] at the position of t' relative to t, 0 outside the window.

    Args:
        w: [h, s, ...], one window axis for each axis of the grid; its centre, s // 2, is the query's own position.
        grid: extents; tokens from `prefix` on fill it in row-major order.
        prefix: leading tokens, which have zero bias as queries and as keys.

    Returns:
        [h, T, T'].
    """
    size, places = w.shape[1], list(itertools.product(*(range(n) for n in grid)))
    out = w.new_zeros(w.shape[0], prefix + len(places), prefix + len(places))
    for t, here in enumerate(places):
        for other, there in enumerate(places):
            offset = [b - a + size // 2 for a, b in zip(here, there, strict=True)]
            if all(0 <= o < size for o in offset):
                value = w
                for o in offset:
                    value = value[:, o]
                out[:, prefix + t, prefix + other] = value
    return out


def conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    grid: tuple[int, ...],
    prefix: int,
    seen: Tensor,
    query: bool = True,
) -> Tensor:
    """aft-conv (equation 6), head by head: q, v [B, h, T, D], k [B, h, T, 1], w [h, s, ...] -> [B, h, T, D]."""
    bias = conv_bias(w.double(), grid, prefix)  # [h, T, T']
    heads = []
    for i in range(q.shape[1]):
        keys = k[:, i].expand_as(v[:, i])  # one key feature weighs all features of its head
        heads.append(aft(q[:, i], keys, v[:, i], bias[i], seen, query))
    return torch.stack(heads, dim=1)


def entropy(w: Tensor) -> Tensor:
    """Σ_i H(softmax(w^i)) over heads i (equation 9): w [h, s, ...] -> a scalar, in nats."""
    total = w.new_zeros(())
    for one in w.double():
        p = one.flatten().exp() / one.exp().sum()
        total = total - (p * p.log()).sum()
    return total


def one_position(w: Tensor) -> Tensor:
    """w ⊙ a one-hot at its largest entry, head by head: equation 10 in evaluation."""
    out = torch.zeros_like(w)
    for i, one in enumerate(w):
        out[i].view(-1)[one.argmax()] = one.max()
    return out
