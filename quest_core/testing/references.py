"""The formula of every mechanism in plain float64, written to be read: the truth that the suites compare with.

Nothing here is fast, and nothing is shared with the modules that it checks. Formulas and sources: [Q] is QUEST,
arXiv 2604.00199, [R] Your Attention Matters, [E] Elliptical Attention, [G] Key-Driven GQA, [C] Cottention,
[A] An Attention Free Transformer, arXiv 2105.14103.

`REFERENCES` holds them by the names of mechanisms, with these arguments: https://quest-attention.github.io/quest/writing-a-mechanism/
A mechanism of another package brings its own: `reference`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..registry import Component


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


def seen_by_some(mask: Tensor | None, batch: int, m: int) -> Tensor:
    """[B, M], True where some query of the sample sees the key."""
    seen = visible(1, m, mask, False)
    return seen.view(*[1] * (4 - seen.dim()), *seen.shape).any(2).any(1).expand(batch, m)


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """exp(l) / Σ exp(l) over the visible keys; a row that sees nothing gives zeros."""
    shifted = torch.where(seen, logits, -math.inf)
    top = shifted.amax(-1, keepdim=True)
    weight = torch.where(seen, (shifted - torch.where(top > -math.inf, top, 0)).exp(), 0)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / torch.where(total > 0, total, 1), 0)


def sigmoid(logits: Tensor, seen: Tensor, bias: float | None = None) -> Tensor:
    """σ(l + b) of the visible keys; b = −log of how many the row sees, unless given ([R], eq. 5)."""
    seen = seen.expand(logits.shape)
    count = seen.sum(-1, keepdim=True)
    shift = -torch.where(count > 0, count, 1).double().log() if bias is None else bias
    return torch.where(seen, 1 / (1 + (-torch.where(seen, logits + shift, 0)).exp()), 0)


def sinkhorn(logits: Tensor, seen: Tensor, iterations: int = 3, eps: float = 1.0) -> Tensor:
    """exp(l/ε), then rows to sum 1 and columns to sum N/M in turn ([R], eq. 7).

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
    """q k̄ᵀ ([Q], section 2.1)."""
    return q @ unit(k).mT * (1 if scale is None else scale)


def qnorm(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q̄ kᵀ ([Q], table 1)."""
    return unit(q) @ k.mT * (1 if scale is None else scale)


def qknorm_hs(q: Tensor, k: Tensor, log_scale: Tensor, cap: float = 100.0, scale: float | None = None) -> Tensor:
    """C_h · q̄ k̄ᵀ with C = exp(log_scale), log_scale [H], at most `cap` ([Q], table 1; Swin v2)."""
    log_scale = torch.where(log_scale > math.log(cap), math.log(cap), log_scale)  # derivative 1 at the cap itself
    return log_scale.exp()[:, None, None] * (unit(q) @ unit(k).mT) * (1 if scale is None else scale)


def qknorm(q: Tensor, k: Tensor, query_scale: Tensor, key_scale: Tensor, scale: float | None = None) -> Tensor:
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ, C [H, D], or [D] shared by heads ([Q], table 1; ViT-22B)."""
    return (
        (query_scale.unsqueeze(-2) * unit(q)) @ (key_scale.unsqueeze(-2) * unit(k)).mT * (1 if scale is None else scale)
    )


SCORES: Mapping[str, Callable[..., Tensor]] = {
    "standard": standard,
    "quest": quest,
    "qnorm": qnorm,
    "qknorm-hs": qknorm_hs,
    "qknorm-ds": qknorm,
    "qknorm": qknorm,
}


def _metric(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, mask: Tensor | None, is_causal: bool
) -> Tensor | float:
    """m [B, H, N, D]: the mean of abs(v − before) over the keys that the query sees, over its maximum in D.

    Args:
        v: [B, H, M, D], and before: [B, H, M, D], the values of the layer before; None in the first layer.
    """
    if before is None:
        return 1.0
    seen = visible(q.shape[2], k.shape[2], mask, is_causal).double()  # [N, M] or wider
    mean = seen / seen.sum(-1, keepdim=True).clamp(min=1) @ (v - before).abs()
    top = mean.amax(-1, keepdim=True)
    return torch.where(top > 0, mean / torch.where(top > 0, top, 1), 1).detach()


def elliptical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor | None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    standard_scale: float | None = None,
) -> Tensor:
    """(q ⊙ m) kᵀ / √D ([E]); `v`, `before`, `mask` and `is_causal` make m."""
    return standard(q * _metric(q, k, v, before, mask, is_causal), k, scale, standard_scale)


def elliptical_quest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor | None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(q ⊙ m) k̄ᵀ ([Q], A.5.2); arguments as of `elliptical`."""
    return quest(q * _metric(q, k, v, before, mask, is_causal), k, scale)


def gqa(k: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
    """The key/value head of each query head [H], H/G consecutive ones each: k [B, G, M, D]."""
    return torch.arange(num_heads) * k.shape[1] // num_heads


def kdgqa(k: Tensor, num_heads: int, mask: Tensor | None, min_queries: int = 0) -> Tensor:
    """As `gqa`, head g with ⌊n̂_g · H / Σ n̂⌋ query heads; the rest by largest fractions ([G], eq. 1-3)."""
    squares = k.square().sum(-1) * seen_by_some(mask, len(k), k.shape[2])[:, None]  # [B, G, M]
    norms = squares.sum(-1).sqrt().mean(0).tolist()
    low, high = min(norms), max(norms)
    n = [(norm - low) / (high - low) if high - low > 1e-6 * high else 1.0 for norm in norms]  # equal but for rounding
    free = num_heads - min_queries * len(n)
    shares = [round(free * x / sum(n), 9) for x in n]
    sizes = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(n)), key=lambda g: (round(sizes[g] - shares[g], 9), g))
    for g in by_fraction[: free - sum(sizes)]:
        sizes[g] += 1
    return torch.arange(len(n)).repeat_interleave(torch.tensor(sizes) + min_queries)


def dgqa(k: Tensor, num_heads: int, mask: Tensor | None, sizes: Tensor) -> Tensor:
    """As `gqa`, head g with sizes[g] query heads, as training has left them ([G], section 3.2)."""
    return torch.arange(len(sizes)).repeat_interleave(sizes.long())


def pgqa(weights: Tensor, seen: Tensor, kv_heads: int, training: bool, noise_in_eval: bool = True) -> Tensor:
    """weights − noise [B, H, N, M], drawn with the mean and deviation of each sample's and group's weights ([G], 3.3).

    The noise is zero where query and key index agree and where a key is not `seen`.
    """
    if not (training or noise_in_eval):
        return weights
    noise = torch.randn(weights.shape, dtype=weights.dtype)
    for sample in zip(weights.detach(), noise, seen, strict=True):
        for own, drawn, counted in zip(*(x.chunk(kv_heads) for x in sample), strict=True):  # [H/G, N, M]
            if counted.any():
                drawn.mul_(own[counted].std(correction=0)).add_(own[counted].mean())
    return weights - noise * (seen & ~torch.eye(*weights.shape[2:], dtype=torch.bool))


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
    normalizer: str = "softmax",
    normalizer_options: Mapping[str, float | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64: q [B, H, N, D], k and v [B, G, M, D] -> output [B, H, N, Dv], weights [B, H, N, M].

    Args:
        score: a name of SCORES.
        parameters: the score's learnable tensors by name, per key/value head already repeated to H heads.
        scale: replaces 1/√D of standard and multiplies the logits of the others.
        normalizer: a name of NORMALISERS.
        normalizer_options: the normalizer's options by name.
    """
    q, k, v = q.double(), k.double(), v.double()
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = SCORES[score](q, k, **{name: p.double() for name, p in (parameters or {}).items()}, scale=scale)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.double()
    seen = visible(q.shape[-2], k.shape[-2], mask, is_causal)
    weights = NORMALISERS[normalizer](logits, seen, **(normalizer_options or {}))
    return weights @ v, weights


def linear(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), φ(x) = elu(x) + 1 ([R], eq. 6).

    Args:
        q: [B, H, N, D], k: [B, H, M, D], v: [B, H, M, Dv].
        key_mask: [B, M], boolean (True = visible) or additive: a key's weight is multiplied by exp of it, −inf hides.
        is_causal: query i sees keys j ≤ i + M − N.

    Returns:
        [B, H, N, Dv]; zeros for a query that sees no key.
    """
    q, k = (torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp()) for x in (q.double(), k.double()))
    weight = torch.where(_seen(q, k, key_mask, is_causal), q @ k.mT * _added(key_mask).exp(), 0)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / torch.where(total > 0, total, 1), 0) @ v.double()


def cosine(
    q: Tensor, k: Tensor, v: Tensor, stabiliser: Tensor, *, key_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Σ_j cos(q_i, k_j) v_j / n_i^σ(m_h), n_i the keys that i sees ([C]; [R], eq. 11).

    Arguments as in `linear`, and stabiliser: m [H].
    """
    seen = _seen(q, k, key_mask, is_causal)
    weight = torch.where(seen, unit(q.double()) @ unit(k.double()).mT * _added(key_mask).exp(), 0)
    count = seen.sum(-1, keepdim=True).double()
    power = 1 / (1 + (-stabiliser.double()).exp())[:, None, None]
    return weight @ v.double() / torch.where(count > 0, count, 1) ** power


def aft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    query: bool = True,
    window: int = 0,
    table: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """aft-simple; with a table or positions aft-full; with a window aft-local. Arguments as of `Family.forward`.

    Args:
        table: w [T_max, T_max].
        query_positions: u [T_max, r] and key_positions: v [T_max, r], whose product is w ([A], eq. 7).
        window: w is 0 at distances from here on ([A], eq. 4); 0 for no limit.
    """
    n, m = q.shape[2], k.shape[2]
    place = torch.arange(n) + (m - n if is_causal else 0)
    if query_positions is not None and key_positions is not None:
        table = query_positions.double() @ key_positions.double().T
    w = torch.zeros(n, m) if table is None else table[place.clamp_min(0)][:, :m]
    if window:
        w = torch.where((place[:, None] - torch.arange(m)).abs() < window, w, 0)
    return _gated_average(q, k, v, w, key_mask, is_causal, query)


def aft_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    weight: Tensor,
    gain: Tensor,
    shift: Tensor,
    grid: str | None = None,
    dims: int = 2,
    prefix: int = 0,
    gumbel: bool = False,
    query: bool = True,
) -> Tensor:
    """aft-conv in evaluation. Tensors as in `Family.forward`, the rest as the options and parameters of aft-conv."""
    places = q.shape[2] - prefix
    sides = ["*"] * dims if grid is None else grid.split("x")
    known = math.prod(int(side) for side in sides if side != "*")
    free = round((places / known) ** (1 / max(sides.count("*"), 1)))
    w = reparameterised(weight, gain, shift)
    if gumbel:  # the largest position of each head only ([A], eq. 10)
        chosen = one_hot(w.flatten(1).argmax(1), w[0].numel())
        w = w * chosen.view(w.shape)
    bias = conv_bias(w, tuple(free if side == "*" else int(side) for side in sides), prefix)
    return _gated_average(q, k, v, bias, key_mask, False, query)


def reparameterised(w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """γ (w − mean(w)) / std(w) + β for each head ([A], eq. 8): w [h, s, ...], γ and β [h]."""
    heads = []
    for one, gamma, beta in zip(w.double(), gain.double(), shift.double(), strict=True):
        centred = one - one.mean()
        deviation = centred.square().mean().sqrt()
        heads.append(gamma * (centred / deviation if deviation > 0 else centred) + beta)
    return torch.stack(heads)


def conv_bias(w: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """The w_tt' that [A], equation 6, means: w[i] at the position of t' relative to t, 0 outside the window.

    Args:
        w: [h, s, ...], one window axis for each axis of the grid; its centre, s // 2, is the query's own position.
        grid: extents; tokens from `prefix` on fill it in row-major order.
        prefix: leading tokens, which have zero bias as queries and as keys.

    Returns:
        [h, T, T'].
    """
    size, places = w.shape[1], list(itertools.product(*(range(n) for n in grid)))
    out = w.new_zeros(w.shape[0], prefix + len(places), prefix + len(places))
    for (t, here), (other, there) in itertools.product(enumerate(places, prefix), repeat=2):
        offset = [b - a + size // 2 for a, b in zip(here, there, strict=True)]
        if all(0 <= o < size for o in offset):
            out[:, t, other] = w.flatten(1)[:, sum(o * size**axis for axis, o in enumerate(reversed(offset)))]
    return out


def entropy(w: Tensor) -> Tensor:
    """Σ_i H(softmax(w^i)) over heads i ([A], eq. 9): w [h, s, ...] -> a scalar, in nats."""
    p = w.double().flatten(1).softmax(1)
    return -(p * p.log()).sum()


def _gated_average(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, key_mask: Tensor | None, is_causal: bool, query: bool
) -> Tensor:
    """σ(Q_t) ⊙ Σ exp(K_t' + w_tt') V_t' / Σ exp(K_t' + w_tt'), every feature by itself ([A], eq. 2).

    Args:
        k: [B, H, M, D], or [B, H, M, 1] for all features of a head.
        w: [N, M] or [H, N, M].
    """
    seen = _seen(q, k, key_mask, is_causal)[:, :, :, None]  # [B, H, N, 1, M]
    values = v.double().mT[:, :, None]  # [B, H, 1, D, M]
    keys = k.double().mT[:, :, None].expand_as(values) + _added(key_mask)[:, :, None]
    average = (softmax(keys + w.double()[..., None, :], seen) * values).sum(-1)
    return torch.sigmoid(q.double()) * average if query else average


def _added(key_mask: Tensor | None) -> Tensor:
    """What a mask [B, M] adds to the logarithms of the weights, [B, 1, 1, M] or [1, 1, 1, 1]."""
    if key_mask is None or key_mask.dtype == torch.bool:
        return torch.zeros(1, 1, 1, 1)
    return key_mask.double()[:, None, None]


def _seen(q: Tensor, k: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
    """[B, H, N, M]."""
    mask = None if key_mask is None else key_mask[:, None, None]
    return visible(q.shape[2], k.shape[2], mask, is_causal).expand(*q.shape[:3], k.shape[2])


REFERENCES: Mapping[str, Callable[..., Tensor]] = {
    **SCORES,
    **NORMALISERS,
    "elliptical": elliptical,
    "elliptical-quest": elliptical_quest,
    **dict.fromkeys(("mha", "gqa", "mqa"), gqa),
    "kdgqa": kdgqa,
    "dgqa": dgqa,
    "pgqa": pgqa,
    "linear": linear,
    "cosine": cosine,
    **dict.fromkeys(("aft-full", "aft-local", "aft-simple"), aft),
    "aft-conv": aft_conv,
}


def reference_of(part: type[Component]) -> Callable[..., Tensor] | None:
    """Return the formula of a mechanism: its own `reference`, or ours."""
    return getattr(part, "reference", None) or REFERENCES.get(part.name)
