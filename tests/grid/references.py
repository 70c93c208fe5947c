"""The plain formula of every mechanism, in any precision, written to be read.

In float64 it is the truth. In the precision of a test its error says how much rounding may cost. Nothing here is
shared with quest_core.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quest_core import AttentionConfig


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis; a zero vector stays zero and has a zero gradient."""
    square = x.square().sum(-1, keepdim=True)
    return torch.where(square > 0, x / torch.where(square > 0, square, 1).sqrt(), torch.zeros_like(x))


def hidden(mask: Tensor) -> Tensor:
    """True where a mask hides: False, −inf, or at most half of the type's minimum."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def wide(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask [N, M] or broadcastable to [B, H, N, M], expanded to `shape`."""
    return mask.expand(shape)


def causal(n: int, m: int) -> Tensor:
    """[N, M], True where query i sees key j: j ≤ i + M − N."""
    return torch.arange(m) <= torch.arange(n)[:, None] + m - n


def softmax(logits: Tensor, seen: Tensor, options: Mapping[str, float]) -> Tensor:
    """exp(l) / Σ exp(l) over the visible keys; zeros in a row that sees none."""
    blind = ~seen.any(-1, keepdim=True)
    top = logits.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True).masked_fill(blind, 0)
    weights = (logits - top).masked_fill(~seen, -math.inf).exp()
    return weights / weights.sum(-1, keepdim=True).masked_fill(blind, 1)


def sigmoid(logits: Tensor, seen: Tensor, options: Mapping[str, float]) -> Tensor:
    """σ(l + b) of the visible keys, b = −log of their number in the row unless given."""
    given = options.get("bias")
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    bias = -count.to(logits.dtype).log() if given is None else given
    return torch.sigmoid((logits + bias).masked_fill(~seen, 0)) * seen


def sinkhorn(logits: Tensor, seen: Tensor, options: Mapping[str, float]) -> Tensor:
    """exp(l/ε); rows to sum 1, columns to sum N/M in turn; rows and columns that see nothing take no mass."""
    rows = seen.any(-1).sum(-1)[..., None, None].clamp(min=1).to(logits.dtype)
    columns = seen.any(-2).sum(-1)[..., None, None].clamp(min=1).to(logits.dtype)
    weights = softmax(logits / options.get("eps", 1.0), seen, {})
    for step in range(2, int(options.get("iterations", 3)) + 1):
        axis = -2 if step % 2 == 0 else -1
        total = weights.sum(axis, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1) * (rows / columns if axis == -2 else 1)
    return weights


NORMALISERS: Mapping[str, Callable[..., Tensor]] = {"softmax": softmax, "sigmoid": sigmoid, "sinkhorn": sinkhorn}


def prepared(score: str, q: Tensor, k: Tensor, learned: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, float]:
    """q, k and the scale of the logits; learnt tensors are those of each head."""
    root = 1 / math.sqrt(q.shape[-1])
    if score in ("standard", "elliptical"):
        return q, k, root
    if score in ("quest", "elliptical-quest"):
        return q, unit(k), 1.0
    if score == "qnorm":
        return unit(q), k, 1.0
    if score == "qknorm-hs":
        scale, cap = learned["log_scale"], math.log(100.0)
        return unit(q) * torch.where(scale > cap, cap, scale).exp()[:, None, None], unit(k), 1.0
    return unit(q) * learned["query_scale"].unsqueeze(-2), unit(k) * learned["key_scale"].unsqueeze(-2), 1.0


def metric(v: Tensor, before: Tensor, seen: Tensor) -> Tensor:
    """Elliptical m: the mean over visible keys of abs(v − v of the layer before), over its maximum over D.

    Args:
        v, before: [B, H, M, D].
        seen: [B, H, N, M], True where the query sees the key; one that sees none takes any metric.

    Returns:
        [B, H, N, D].
    """
    change = (v - before).abs().detach()
    rows = []
    for i in range(seen.shape[2]):
        own = seen[:, :, i, :, None]  # [B, H, M, 1]
        rows.append((change * own).sum(2) / own.sum(2).clamp(min=1))
    mean = torch.stack(rows, 2)
    top = mean.amax(-1, keepdim=True)
    return torch.where(top > 0, mean / torch.where(top > 0, top, 1), torch.ones_like(mean))


def allocated(importance: list[float], heads: int, least: int = 0) -> list[int]:
    """Query heads of each key/value head: the floor of its share, the rest by largest fraction, ties to the lower."""
    groups, free = len(importance), heads - least * len(importance)
    total = sum(importance)
    shares = [free * (x / total if total > 0 else 1 / groups) for x in importance]
    sizes = [math.floor(share + 1e-9) for share in shares]
    fractions = [round((share - size) * 1e9) for share, size in zip(shares, sizes, strict=True)]
    order = sorted(range(groups), key=lambda g: (-fractions[g], g))
    for g in order[: free - sum(sizes)]:
        sizes[g] += 1
    return [size + least for size in sizes]


def key_norms(k: Tensor, seen: Tensor) -> list[float]:
    """The Frobenius norm of each key head over visible tokens, averaged over the batch: k [B, G, M, D] -> [G]."""
    tokens = k.detach().double() * seen[:, None, :, None]
    return [float(norm) for norm in tokens.square().sum((2, 3)).sqrt().mean(0)]


@dataclass
class KeyDriven:
    """dgqa's state between calls."""

    heads: int
    groups: int
    window: int
    evolution: str
    alpha: float = 0.9
    least: int = 0
    norms: list[float] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.sizes = self.pending = allocated([1.0] * self.groups, self.heads, self.least)

    def train(self, current: list[float]) -> None:
        """One training step with these key norms; `sizes` are those that it uses."""
        self.sizes = self.pending
        if self.steps == 0:
            self.norms = current
        elif self.steps % self.window == 0:
            if self.evolution == "ema":
                pairs = zip(current, self.norms, strict=True)
                self.norms = importance = [self.alpha * n + (1 - self.alpha) * c for n, c in pairs]
            else:
                importance = [abs(n - c) for n, c in zip(current, self.norms, strict=True)]
                self.norms = current
            self.pending = allocated(importance, self.heads, self.least)
        self.steps += 1


def head_of_each(config: AttentionConfig, k: Tensor, heads: int, seen: Tensor, state: KeyDriven | None) -> list[int]:
    """The key/value head of every query head."""
    groups, grouping = k.shape[1], config["grouping"]
    least = int(config.option("min_queries") or 0)
    if grouping == "kdgqa":
        norms = key_norms(k, seen)
        low, high = min(norms), max(norms)
        scaled = [(n - low) / (high - low) if high > low else 1.0 for n in norms]
        sizes = allocated(scaled, heads, least)
    elif grouping == "dgqa":
        assert state is not None
        sizes = state.sizes
    else:
        sizes = [heads // groups] * groups
    return [g for g, size in enumerate(sizes) for _ in range(size)]


def perturbed(weights: Tensor, groups: int, seen: Tensor, draw: Callable[..., Tensor]) -> Tensor:
    """pgqa: weights less Gaussian noise of each group's mean and deviation, but not where query and key agree."""
    batch, _, n, m = weights.shape
    inside = weights.detach().reshape(batch, groups, -1)
    counted = seen.expand(weights.shape).reshape(inside.shape)
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = (inside * counted).sum(-1, keepdim=True) / count
    deviation = (((inside - mean) * counted).square().sum(-1, keepdim=True) / count).sqrt()
    noise = (mean + deviation * draw(inside.shape).to(weights.dtype)).reshape(weights.shape)
    return weights - noise * seen * ~torch.eye(n, m, dtype=torch.bool)


def attend(
    config: AttentionConfig,
    learned: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    state: KeyDriven | None = None,
    before: Tensor | None = None,
    draw: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The output [B, H, N, Dv] in the type of q [B, H, N, D]; k and v are [B, G, M, ...].

    Args:
        learned: the mechanism's parameters by the last part of their name.
        state: of dgqa.
        before: the values of the layer before [B, G, M, D], of an elliptical score; None for the first layer.
        draw: makes pgqa's Gaussian noise of a shape; None for no noise.
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        unused = sum(x.sum() for x in (q, k, v, *learned.values())) * 0
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + unused
    if config.family is not None:
        return FAMILIES[config.family](config, learned, q, k, v, mask=mask, is_causal=is_causal)
    batch, heads, n, _ = q.shape
    groups, m = k.shape[1:3]
    shape = (batch, heads, n, m)
    seen = torch.ones(shape, dtype=torch.bool) if mask is None else ~wide(hidden(mask), shape)
    any_query = seen.any(2).any(1)  # [B, M]
    head = head_of_each(config, k, heads, any_query, state)
    learned = {name: x[head] if name == "key_scale" and x.dim() > 1 else x for name, x in learned.items()}
    k, v = k[:, head], v[:, head]
    if is_causal:
        seen = seen & causal(n, m)
    if before is not None:
        q = q * metric(v, before[:, head], seen)
    q, k, scale = prepared(config["score"], q, k, learned)
    given = config.option("scale")
    logits = q @ k.mT * (scale if given is None else given)
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + torch.where(wide(hidden(mask), shape), torch.zeros_like(mask), mask).to(logits.dtype)
    options = {o: config.option(o) for o in ("bias", "eps", "iterations") if config.option(o) is not None}
    weights = NORMALISERS[config["normalizer"]](logits, seen, options)
    if draw is not None:
        weights = perturbed(weights, groups, seen, draw)
    return weights @ v


def _key_mask(mask: Tensor | None, batch: int, m: int) -> tuple[Tensor, Tensor | None]:
    """[B, M] True where visible, and what an additive mask adds to the keys there."""
    if mask is None:
        return torch.ones(batch, m, dtype=torch.bool), None
    assert mask.shape[1:3] == (1, 1)
    mask = mask[:, 0, 0].expand(batch, m)
    return ~hidden(mask), None if mask.dtype == torch.bool else mask.masked_fill(hidden(mask), 0)


def _seen(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """[B, 1, N, M]."""
    n, m = q.shape[2], k.shape[2]
    seen = _key_mask(mask, q.shape[0], m)[0][:, None, None, :].expand(-1, 1, n, m)
    return seen & causal(n, m) if is_causal else seen


def linear(
    config: AttentionConfig,
    learned: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """φ(q)·φ(k) v / Σ φ(q)·φ(k), φ(x) = elu(x) + 1."""
    q, k = (torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp()) for x in (q, k))
    weights = (q @ k.mT) * _seen(q, k, mask, is_causal)
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total > 0, total, 1)


def cosine(
    config: AttentionConfig,
    learned: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """q̄ (k̄ᵀ v) / n^σ(m), n the visible keys of each query."""
    seen = _seen(q, k, mask, is_causal)
    count = seen.sum(-1, keepdim=True).clamp(min=1).to(q.dtype)
    return (unit(q) @ unit(k).mT * seen) @ v / count ** torch.sigmoid(learned["stabiliser"])[:, None, None]


def attention_free(
    config: AttentionConfig,
    learned: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """σ(Q_t) ⊙ Σ exp(K_t' + w_tt') V_t' / Σ exp(K_t' + w_tt'), feature by feature."""
    n, m = q.shape[2], k.shape[2]
    seen = _seen(q, k, mask, is_causal)
    added = _key_mask(mask, q.shape[0], m)[1]
    keys = k if added is None else k + added[:, None, :, None].to(k.dtype)
    logits = keys[:, :, None].expand(-1, -1, n, -1, v.shape[-1])  # [B, H, N, M, D]
    bias = _bias(config, learned, n, m, is_causal)
    if bias is not None:
        logits = logits + bias[..., None]  # [N, M, 1] or [H, N, M, 1]
    weights = softmax(logits.transpose(-1, -2), seen[:, :, :, None].expand(*logits.shape[:3], v.shape[-1], m), {})
    y = (weights * v.transpose(-1, -2)[:, :, None]).sum(-1)
    return torch.sigmoid(q) * y if config.option("query") else y


def _bias(config: AttentionConfig, learned: Mapping[str, Tensor], n: int, m: int, is_causal: bool) -> Tensor | None:
    """w: [N, M], [H, N, M] or None."""
    if config.family == "aft-simple":
        return None
    if config.family == "aft-conv":
        w = _standardised(learned["weight"]) * _like(learned["gain"], learned["weight"])
        w = w + _like(learned["shift"], w)
        if config.option("gumbel"):  # evaluation: one position a head
            flat = w.flatten(1)
            w = (flat * torch.nn.functional.one_hot(flat.argmax(1), flat.shape[1])).reshape(w.shape)
        return _on_grid(w, config, n)
    table = learned["table"] if "table" in learned else learned["query_positions"] @ learned["key_positions"].mT
    first = m - n if is_causal else 0
    rows = torch.arange(n) + first
    w = table[rows.clamp(min=0)][:, :m]
    if config.family == "aft-local":
        near = (rows[:, None] - torch.arange(m)).abs() < int(config.option("window"))
        w = w * near
    return w


def _like(x: Tensor, y: Tensor) -> Tensor:
    return x.reshape(-1, *[1] * (y.dim() - 1))


def _standardised(w: Tensor) -> Tensor:
    flat = w.flatten(1)
    if flat.shape[1] == 1:
        return flat.sub(flat).reshape(w.shape)  # one position has no deviation
    centred = flat - flat.mean(1, keepdim=True)
    return (centred / centred.square().mean(1, keepdim=True).sqrt()).reshape(w.shape)


def _on_grid(w: Tensor, config: AttentionConfig, tokens: int) -> Tensor:
    """w [h, s, ...] by relative position -> [h, T, T]; prefix tokens have no bias."""
    axes, prefix, size = int(config.option("dims")), int(config.option("prefix")), w.shape[1]
    side = round((tokens - prefix) ** (1 / axes))
    places = list(itertools.product(range(side), repeat=axes))
    assert len(places) == tokens - prefix
    index = torch.full((tokens, tokens), w[0].numel())
    for (t, here), (other, there) in itertools.product(enumerate(places), repeat=2):
        offset = [b - a + size // 2 for a, b in zip(here, there, strict=True)]
        if all(0 <= o < size for o in offset):
            index[prefix + t, prefix + other] = sum(o * size**p for p, o in enumerate(reversed(offset)))
    return torch.cat([w.flatten(1), w.new_zeros(w.shape[0], 1)], 1)[:, index]


FAMILIES: Mapping[str, Callable[..., Tensor]] = {
    "linear": linear,
    "cosine": cosine,
    **dict.fromkeys(("aft-full", "aft-local", "aft-simple", "aft-conv"), attention_free),
}
