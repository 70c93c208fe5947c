"""QK norms as shipped models have them, with learned gains. They act after the host's rotary embedding."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from quest_core import Option, register
from quest_core.mechanisms import Dims, local, wider
from quest_core.mechanisms.scores import SCALE, Standard

EPS = Option("eps", float, 1e-6, "added to the mean square", 1e-12)


@register("qk-rmsnorm", source="Qwen3, 2025: arXiv 2505.09388", options=(SCALE, EPS))
class QKRMSNorm(Standard):
    """(γ_q ⊙ q/rms(q))(γ_k ⊙ k/rms(k))ᵀ / √D.

    The root mean square is over the features of a head, and one γ serves all heads.
    """

    learnable = True
    reads: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[tuple[int, ...]] = (-1,)  # over which a norm is taken: features, or heads and features

    def __init__(self, dims: Dims, *, scale: float | None, eps: float) -> None:
        super().__init__(dims, scale=scale)
        self.eps = eps
        heads = ((), ()) if self.axes == (-1,) else ((dims.num_heads,), (dims.kv_heads,))
        self.query_gain, self.key_gain = (nn.Parameter(torch.ones(*own, dims.head_dim)) for own in heads)  # [D], [H, D]

    def query(self, q: Tensor) -> Tensor:
        return self.normalize(q, local(self.query_gain))

    def key(self, k: Tensor) -> Tensor:
        return self.normalize(k, local(self.key_gain))

    def normalize(self, x: Tensor, gain: Tensor) -> Tensor:
        """Return x [B, H, N, D], normalized and times gain [D] or [H, D], in the type of x."""
        wide = self.center(x.to(wider(x.dtype)))
        inverse = (wide.square().mean(self.axes, keepdim=True) + self.eps).rsqrt()
        return (wide * inverse * gain.to(wide.dtype).unsqueeze(-2)).to(x.dtype)

    def center(self, x: Tensor) -> Tensor:
        """Return what is divided by its root mean square."""
        return x

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        q, k = (
            self.center(x) / (self.center(x).square().mean(self.axes, keepdim=True) + self.eps).sqrt() for x in (q, k)
        )
        q, k = q * self.query_gain.unsqueeze(-2), k * self.key_gain.unsqueeze(-2)
        return q @ k[:, head].mT * self.scale(q.shape[-1])


@register("qk-rmsnorm-across", source="OLMo 2, 2024: arXiv 2501.00656", options=(SCALE, EPS))
class QKRMSNormAcross(QKRMSNorm):
    """(γ_q ⊙ q/rms(q))(γ_k ⊙ k/rms(k))ᵀ / √D, rms over all heads.

    γ has a value for every feature of every head.
    """

    reads = ("group", "heads")
    axes = (-3, -1)


@register("qk-layernorm", source="ViT-22B, 2023: arXiv 2302.05442, section 2", options=(SCALE, EPS))
class QKLayerNorm(QKRMSNorm):
    """(γ_q ⊙ LN(q))(γ_k ⊙ LN(k))ᵀ / √D.

    LN subtracts the mean of a head's features, and divides by their deviation. It has no bias.
    """

    def center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)
