"""Scalable softmax: sharper attention with more keys."""

from typing import Any

import torch
from torch import Tensor, nn

from quest_core import Option, register
from quest_core.compat import refuse_to_count_keys
from quest_core.mechanisms import Dims, local, wider
from quest_core.mechanisms.scores import SCALE, Standard
from quest_core.ops import merge_causal, visible

INIT = Option("init", float, 0.43, "starting value of s_h", 1e-6, starts="own")


@register("ssmax", source="Nakanishi, 2025: arXiv 2501.19399, eq. 3", options=(SCALE, INIT))
class SSMax(Standard):
    """s_h log(n) q kᵀ / √D, n the visible keys.

    s_h is one learnable factor per head. A query that sees one key has logit 0.
    """

    learnable = True
    reads = ("tokens",)

    def __init__(self, dims: Dims, *, scale: float | None, init: float) -> None:
        super().__init__(dims, scale=scale)
        self.slope = nn.Parameter(torch.full((dims.num_heads,), init))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, **how: Any) -> Any:
        refuse_to_count_keys("ssmax")
        cache = how.get("cache")
        m = k.shape[2] + (0 if cache is None else cache.tokens)
        both = merge_causal(mask, q.shape[2], m, q.device) if is_causal else mask
        seen = torch.ones(1, 1, 1, m, dtype=torch.bool, device=q.device) if both is None else visible(both)
        count = seen.expand(-1, -1, -1, m).sum(-1, keepdim=True).clamp(min=1)  # [B or 1, H or 1, N or 1, 1]
        wide = wider(q.dtype)
        sharpness = local(self.slope).to(wide)[:, None, None] * count.to(wide).log()
        return super().forward(q * sharpness.to(q.dtype), k, v, mask=mask, is_causal=is_causal, **how)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        n = seen.sum(-1, keepdim=True).clamp(min=1).to(q.dtype)
        return self.slope[:, None, None] * n.log() * (q @ k[:, head].mT) * self.scale(q.shape[-1])
