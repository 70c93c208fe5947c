"""A soft cap: logits that cannot grow beyond a bound."""

import torch
from torch import Tensor

from quest_core import Option, ScoreMod, register
from quest_core.mechanisms import Dims
from quest_core.mechanisms.normalizers import IN_BLOCKS

CAP = Option("cap", float, 50.0, "c, which no logit exceeds", 1e-3)


@register("softcap", source="Gemma 2, 2024: arXiv 2408.00118, section 2", options=(CAP,))
class SoftCap(ScoreMod):
    """l ← c tanh(l / c)."""

    causal = cross = cached = True
    reads = ("tokens",)
    complexity = IN_BLOCKS

    def __init__(self, dims: Dims | None, *, cap: float) -> None:
        super().__init__(dims)
        self.cap = cap

    def change(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)

    def reference(self, logits: Tensor, x: Tensor | None) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)
