"""Softmax with one more logit, whose weight goes to no value."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quest_core import Normalizer, Option, register
from quest_core.mechanisms import Dims, local, naive
from quest_core.mechanisms.normalizers import Softmax

from .sink_kernel import attend_with_sink


@register("softmax1", source="Miller, 2023: Attention Is Off By One")
class Softmax1(Normalizer):
    """exp(l) / (1 + Σ exp(l)).

    Through the fused kernel it is a softmax with one more key, a zero vector whose value is zero; on a CPU, a factor on
    the output where that is possible.
    """

    causal = cross = cached = dropout = True
    reads = ("tokens",)
    complexity = Softmax.complexity
    features = 0  # further features that queries and keys need

    def __init__(self, dims: Dims | None) -> None:
        super().__init__(dims)
        self.softmax = Softmax(dims)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, **how: Any) -> Any:
        if how.keys() - {"is_causal", "dropout_p", "grouped"}:
            return super().forward(q, k, v, scale=scale, mask=mask, **how)
        if mask is None and not how["dropout_p"] and not how["grouped"]:
            out = attend_with_sink(q, k, v, self.sink(), how["is_causal"], scale)
            if out is not None:
                return out
        width, square = v.shape[-1], q.shape[2] == k.shape[2]
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], k.shape[2]), (1, 0), value=mask.dtype == torch.bool)
        k, v = (F.pad(x, (0, self.features, 1, 0)) for x in (k, v))  # kernels of the CPU want as many features in v
        q, k = self.extend(q, k, scale)
        if how["is_causal"] and square and mask is None:  # one more query keeps the kernel's own causal mask
            return self.softmax(F.pad(q, (0, 0, 1, 0)), k, v, scale=scale, mask=mask, **how)[:, :, 1:, :width]
        return self.softmax(q, k, v, scale=scale, mask=mask, **how)[..., :width]

    def extend(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return q and k, whose first key and last `features` are 0, such that this key has the sink's logit."""
        return q, k

    def sink(self) -> Tensor:
        """Return the sink's logit, [H, 1, 1] or less."""
        return torch.zeros(())

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        sink = self.sink().to(logits).expand(*logits.shape[:-1], 1)
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], logits.shape[-1]), (1, 0), value=mask.dtype == torch.bool)
        return self.softmax.weights(torch.cat([sink, logits], -1), mask)[..., 1:]

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        wide = torch.cat([logits, self.sink().to(logits).expand(*logits.shape[:-1], 1)], -1)
        return naive.softmax(wide, F.pad(seen, (0, 1), value=True))[..., :-1]


LOGIT = Option("logit", float, 0.0, "starting value of the sinks s_h", starts="own")


@register("sink", source="gpt-oss, 2025; Xiao et al., 2023", options=(LOGIT,))
class Sink(Softmax1):
    """exp(l) / (exp(s_h) + Σ exp(l)).

    s_h is one learnable logit per head. Through the fused kernel it is one more key and one more feature.
    """

    learnable = True
    features = 1

    def __init__(self, dims: Dims, *, logit: float) -> None:
        super().__init__(dims)
        self.logit = nn.Parameter(torch.full((dims.num_heads,), logit))

    def sink(self) -> Tensor:
        return local(self.logit)[:, None, None]

    def extend(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k[:, :, 0, -1] = 1  # a tensor of our own, which pad has made
        return torch.cat([q, (self.sink().to(q) / scale).expand(*q.shape[:3], 1)], -1), k
