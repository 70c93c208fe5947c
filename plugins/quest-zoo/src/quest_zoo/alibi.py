"""ALiBi: the farther away a key is, the smaller its logit."""

import torch
from torch import Tensor

from quest_core import Cache, ScoreMod, register


@register("alibi", source="Press et al., 2021: arXiv 2108.12409, section 3")
class ALiBi(ScoreMod):
    """l_ij ← l_ij − m_h abs(i − j), with slopes m_h from 2^(−8/H) to 1/256.

    A fused kernel takes the bias as a mask. For other H than powers of two, the slopes are those of the next smaller
    power, then every other one of the next larger, as in the paper's code.
    """

    causal = cached = fused = True
    reads = ("tokens", "order", "heads")  # a slope belongs to one of all heads
    complexity = "O(N·M·D) time, O(N·M) memory for the bias"

    def bias(self, q: Tensor, k: Tensor, x: Tensor | None, cache: Cache | None) -> Tensor:
        keys = torch.arange(k.shape[2], device=q.device)
        distance = (keys[k.shape[2] - q.shape[2] :, None] - keys).abs()  # [N, M]
        slopes = torch.tensor(slopes_of(q.shape[1]), device=q.device)[:, None, None]  # [H, 1, 1]
        return (-slopes * distance).to(q.dtype)[None]

    def reference(self, logits: Tensor, x: Tensor | None) -> Tensor:
        n, m = logits.shape[-2:]
        away = (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs()
        return logits - torch.tensor(slopes_of(logits.shape[1]), dtype=logits.dtype)[:, None, None] * away


def slopes_of(heads: int) -> list[float]:
    """Return the slope of each head."""
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above H
    smaller, larger = ([2 ** (-8 * (i + 1) / count) for i in range(count)] for count in (power, 2 * power))
    return smaller + larger[::2][: heads - power]
