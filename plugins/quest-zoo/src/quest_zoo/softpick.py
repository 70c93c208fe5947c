"""Softpick: keys with negative logits get no weight, and the weights need not sum to 1."""

import torch
from torch import Tensor

from quest_core import Normalizer, register
from quest_core.mechanisms.normalizers import IN_BLOCKS
from quest_core.ops import visible, widen

EPS = 1e-8  # added to the sum of exp(l − top), so a query whose logits are all 0 attends to nothing


@register("softpick", source="Zuhri et al., 2025: arXiv 2504.20966, eq. 2")
class Softpick(Normalizer):
    """relu(exp(l) − 1) / Σ abs(exp(l) − 1)."""

    causal = cross = cached = dropout = rowwise = True
    reads = ("tokens",)
    complexity = IN_BLOCKS

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        x = widen(logits)
        if mask is not None:
            hidden = ~visible(mask)
            x = (x if mask.dtype == torch.bool else x + mask.masked_fill(hidden, 0)).masked_fill(hidden, 0)
        top = x.detach().amax(-1, keepdim=True).clamp(min=0)  # a hidden key is a logit of 0, which adds nothing
        size = (x.relu() - top).exp() * -torch.expm1(-x.abs())  # |exp(l) − 1| / exp(top), exact also for small l
        return (size * (x > 0) / (size.sum(-1, keepdim=True) + EPS)).to(logits.dtype)

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        top = logits.detach().masked_fill(~seen, 0).amax(-1, keepdim=True).clamp(min=0)
        away = seen * ((logits - top).masked_fill(~seen, 0).exp() - (-top).exp())
        return away.clamp(min=0) / (away.abs().sum(-1, keepdim=True) + EPS)
