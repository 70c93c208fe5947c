"""α-entmax: sparse weights, between softmax (α → 1) and sparsemax (α = 2)."""

import torch
from torch import Tensor

from quest_core import ConfigError, Normalizer, Option, register
from quest_core.mechanisms import Dims, naive
from quest_core.mechanisms.normalizers import IN_BLOCKS
from quest_core.ops import visible, widen

ALPHA = Option("alpha", float, 1.5, "α, at most 2; 2 is sparsemax", 1.05)
STEPS = 24  # of Newton's method without a gradient: enough for 10,000 keys in any distribution


@register("entmax", source="Peters et al., 2019: arXiv 1905.05702, eq. 10", options=(ALPHA,))
class Entmax(Normalizer):
    """relu((α−1)l − τ)^(1/(α−1)), τ such that the sum is 1."""

    causal = cross = cached = dropout = rowwise = True
    reads = ("tokens",)
    complexity = IN_BLOCKS

    def __init__(self, dims: Dims | None, *, alpha: float) -> None:
        super().__init__(dims)
        if alpha > 2:
            raise ConfigError(f"attention 'entmax': alpha is {alpha:g}; expected 1.05 to 2, where 2 is sparsemax")
        self.alpha = alpha

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        x, power = widen(logits), 1 / (self.alpha - 1)
        if mask is not None:
            hidden = ~visible(mask).expand(x.shape)
            x = x if mask.dtype == torch.bool else x + mask
            x = x.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0)
        x = (x - x.detach().amax(-1, keepdim=True)) / power
        # The sum is convex in τ and at least 1 at −1, so Newton's steps from there do not pass the solution.
        tau = torch.full_like(x[..., :1], -1)
        for step in range(STEPS + 2):  # the last two record, which makes the first and second derivative exact
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= STEPS):
                slopes = _power(x - tau, power - 1)
                excess = (slopes * (x - tau).relu()).sum(-1, keepdim=True) - 1
                tau = tau + excess / (power * slopes.sum(-1, keepdim=True)).detach()
        weights = _power(x - tau, power)
        return (weights if mask is None else weights.masked_fill(hidden, 0)).to(logits.dtype)

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        power = 1 / (self.alpha - 1)
        x = logits.detach().masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0) / power
        low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
        for _ in range(60):
            middle = (low + high) / 2
            above = (x - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) > 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        weights = (x - low).clamp(min=0).pow(power) * seen
        slopes = torch.where(weights > 0, weights ** (2 - self.alpha), 0)  # the derivative is diag(s) − s sᵀ / Σ s
        change = slopes * (logits - logits.detach())
        return weights + change - naive.ratio(slopes, slopes.sum(-1, keepdim=True)) * change.sum(-1, keepdim=True)


def _power(x: Tensor, power: float) -> Tensor:
    """Return relu(x)^power, whose derivatives are 0 where x is not positive."""
    return torch.where(x > 0, torch.where(x > 0, x, 1).pow(power), 0)
