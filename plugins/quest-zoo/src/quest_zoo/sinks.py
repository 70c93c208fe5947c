"""Softmax with one more logit, whose weight goes to no value."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quest_core import Option, register
from quest_core.mechanisms import Dims, local, naive
from quest_core.mechanisms.normalizers import Softmax

from .sink_kernel import attend_with_sink


def wider_mask(mask: Tensor, keys: int) -> Tensor:
    """Return a mask of `keys` keys with one more key before them, which every query sees."""
    seen = 1.0 if mask.dtype == torch.bool else 0.0
    return F.pad(mask.expand(*mask.shape[:-1], keys), (1, 0), value=seen)


@register("softmax1", source="Miller, 2023: Attention Is Off By One")
class Softmax1(Softmax):
    """exp(l) / (1 + Σ exp(l)).

    Through the fused kernel it is a softmax with one more key, a zero vector whose value is zero; on a CPU, a factor on
    the output where that is possible.
    """

    fused = False
    reads = ("tokens",)
    features = 0  # further features that queries and keys need

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, **how: Any
    ) -> Tensor:
        out = None if dropout_p else attend_with_sink(q, k, v, self.sink(), mask, is_causal, **how)
        if out is not None:
            return out
        width = v.shape[-1]
        mask = mask if mask is None else wider_mask(mask, k.shape[2])
        k, v = (F.pad(x, (0, self.features, 1, 0)) for x in (k, v))  # kernels of the CPU want as many features in v
        q, k = self.extend(q, k, how["scale"])
        q = F.pad(q, (0, 0, 1, 0)) if is_causal else q  # one more query keeps the kernel's own causal mask
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **how)
        return out[:, :, int(is_causal) :, :width]

    def sink(self) -> Tensor:
        """Return the sink's logit, [H, 1, 1] or less."""
        return torch.zeros(())

    def extend(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return q and k, whose first key and last `features` are 0, such that this key has the sink's logit."""
        return q, k

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        wide = torch.cat([self.sink().to(logits).expand(*logits.shape[:-1], 1), logits], -1)
        mask = mask if mask is None else wider_mask(mask, logits.shape[-1])
        return super().weights(wide, mask)[..., 1:]

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
