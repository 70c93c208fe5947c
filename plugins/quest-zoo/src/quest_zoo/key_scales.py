"""What stands between free keys and unit keys: a gain, and norms over a running scale of their head."""

from typing import Any

import torch
from torch import Tensor, nn

from quest_core import Option, Score, UnsupportedError, register
from quest_core.compat import is_recomputing, transform
from quest_core.mechanisms import Dims, local, naive, unit, visible, wider
from quest_core.mechanisms.scores import STARTS, Quest

MOMENTUM = 0.01  # the share of a step in the running scale
BOUND = 8.0  # of r / s_h in fkn


@register("quest-gain", source="QUEST, section 2.1, with a gain as in x-transformers' k_rmsnorm", options=STARTS)
class QuestGain(Quest):
    """q (γ ⊙ k̄)ᵀ.

    γ has a value per feature and serves all heads. It is applied to the queries, so that caches hold unit keys.
    """

    learnable = True

    def __init__(self, dims: Dims, *, scale: float | None) -> None:
        super().__init__(dims, scale=scale)
        self.gain = nn.Parameter(torch.ones(dims.head_dim))

    def query(self, q: Tensor) -> Tensor:
        return q * local(self.gain).to(q.dtype)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return q @ (self.gain * naive.unit(k))[:, head].mT * self.scale(q.shape[-1])


@register("kscale", source="CisnerosCodes, daily-research-lab, 2026", options=STARTS)
class KeyScale(Score):
    """q (γ ⊙ k / s_h)ᵀ, s_h the running mean of ‖k‖.

    A key keeps its norm relative to the other keys of its head. s_h moves by a hundredth of the difference per training
    step, without keys that a mask hides from all queries, and the first step sets it. Replicas hold that of their own
    batches, as in batch norm. γ has a value per feature and serves all heads; in the source each head has its own.
    """

    causal = cross = cached = learnable = stateful = True
    reads = ("heads", "samples")  # s_h belongs to one of all heads, and is a mean over the batch
    running: Tensor
    pending: Tensor
    steps: Tensor

    def __init__(self, dims: Dims, *, scale: float | None) -> None:
        super().__init__(dims, scale=scale)
        self.gain = nn.Parameter(torch.ones(dims.head_dim))
        for name in ("running", "pending"):  # s_h, and s_h of the next step
            self.register_buffer(name, torch.ones(dims.kv_heads, dtype=torch.float32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.float32))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, **how: Any
    ) -> tuple[Tensor, Tensor, float]:
        if self.training and not is_recomputing():
            if mask is not None and (cache := how.get("cache")) is not None and mask.shape[-1] > 1:
                mask = mask[..., cache.tokens :]  # k has the new tokens
            self.observe(k, mask)
        return super().forward(q, k, v, mask=mask, is_causal=is_causal, **how)

    def key(self, k: Tensor) -> Tensor:
        wide = k.to(wider(k.dtype))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [B, G, M, 1]
        scale = self.running.to(norm.dtype, copy=True)  # the next step changes the buffer
        scale = torch.where(scale > 0, scale, 1)[:, None, None]  # [G, 1, 1]
        return (self.resize(wide, norm / scale) * local(self.gain)).to(k.dtype)

    def resize(self, k: Tensor, ratio: Tensor) -> Tensor:
        """Return k [B, G, M, D] with a norm that follows from ratio [B, G, M, 1], ‖k‖ / s_h."""
        return unit(k) * ratio

    @torch.no_grad()
    def observe(self, k: Tensor, mask: Tensor | None) -> None:
        """Count a training step of keys [B, G, M, D]. Checkpointing, which repeats a step, finds what it had."""
        if (active := transform()) is not None:
            raise UnsupportedError(f"attention '{self.name}' counts norms while training, which {active} forbids")
        norm = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=wider(k.dtype))  # [B, G, M]
        seen = torch.ones_like(norm[:, 0], dtype=torch.bool)  # [B, M]
        if mask is not None:
            seen = seen & visible(mask).any(2).any(1)
        now = (torch.where(seen[:, None], norm, 0).sum((0, 2)) / seen.sum()).to(self.pending)  # [G]
        counts = now.isfinite().all()  # not after an overflow, or without keys
        self.running.copy_(torch.where(counts & (self.steps == 0), now, self.pending))
        self.pending.copy_(torch.where(counts, torch.lerp(self.running, now, MOMENTUM), self.pending))
        self.steps.add_(counts)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        k = k / self.running[:, None, None] * self.gain
        return q @ k[:, head].mT * self.scale(q.shape[-1])


ALPHA = Option("alpha", float, 0.5, "starting value of α_h; 0 is unit keys, 1 is kscale", starts="own")


@register("fkn", source="CisnerosCodes, daily-research-lab, 2026", options=(*STARTS, ALPHA))
class FractionalKeyNorm(KeyScale):
    """q (γ ⊙ k̄ clamp(‖k‖ / s_h, 1/8, 8)^α_h)ᵀ.

    α_h is learnable for each key head, and s_h is that of `kscale`.
    """

    def __init__(self, dims: Dims, *, scale: float | None, alpha: float) -> None:
        super().__init__(dims, scale=scale)
        self.alpha = nn.Parameter(torch.full((dims.kv_heads,), alpha))

    def resize(self, k: Tensor, ratio: Tensor) -> Tensor:
        return unit(k) * ratio.clamp(1 / BOUND, BOUND).pow(local(self.alpha).to(k.dtype)[:, None, None])

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        ratio = k.square().sum(-1, keepdim=True).sqrt() / self.running[:, None, None]
        k = naive.unit(k) * ratio.clamp(1 / BOUND, BOUND) ** self.alpha[:, None, None] * self.gain
        return q @ k[:, head].mT * self.scale(q.shape[-1])
