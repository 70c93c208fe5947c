"""Scores: how queries and keys meet. Formulas: [Q] is QUEST, arXiv 2604.00199."""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops import local, unit
from ..registry import Option, register
from . import naive
from .base import Dims, Score

SCALE = Option("scale", float, None, "factor on the logits in place of the score's own", 1e-6, nullable=True)
_START = "expected norm of a head's {} in a fresh model; null keeps the host's initialization"
QUERY_START = Option("init", float, None, _START.format("queries"), 1e-6, nullable=True, starts="q")
KEY_START = Option("key_init", float, None, _START.format("keys"), 1e-6, nullable=True, starts="k")
STARTS = (SCALE, QUERY_START, KEY_START)
_C_Q = Option("init", float, None, "starting value of C_q and C_k; null means D^¼", 1e-6, nullable=True, starts="own")


@register("standard", source="Vaswani et al., 2017", options=(SCALE,))
class Standard(Score):
    """q kᵀ / √D."""

    causal = cross = cached = True
    reads: ClassVar[tuple[str, ...]] = ()
    factor: float | None = None

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return q @ k[:, head].mT * self.scale(q.shape[-1])


@register("quest", source="QUEST, section 2.1", options=STARTS)
class Quest(Score):
    """q k̄ᵀ.

    It has no further scale: a key's norm does not change how much attention it gets, and a query's norm sets how
    sharply it attends.
    """

    causal = cross = cached = unit_keys = True
    reads = ()

    key = staticmethod(unit)  # type: ignore[assignment]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return q @ naive.unit(k)[:, head].mT * self.scale(q.shape[-1])


@register(
    "qnorm",
    source="QUEST, table 1",
    options=(SCALE, replace(QUERY_START, name="query_init"), replace(KEY_START, name="init")),
)
class QNorm(Score):
    """q̄ kᵀ."""

    causal = cross = cached = True
    reads = ()

    query = staticmethod(unit)  # type: ignore[assignment]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return naive.unit(q) @ k[:, head].mT * self.scale(q.shape[-1])


@register(
    "qknorm-hs",
    source="QUEST, table 1; Swin v2",
    options=(
        SCALE,
        Option("init", float, 10.0, "starting value of the scale C_h of every head", 1e-6, starts="own"),
        Option("cap", float, 100.0, "largest value of C_h", minimum=1e-6),
    ),
)
class QKNormHS(Score):
    """C_h · q̄ k̄ᵀ.

    C_h is one learnable scale per head, stored as its logarithm and capped.
    """

    causal = cross = cached = learnable = unit_keys = True
    reads = ()

    def __init__(self, dims: Dims, *, scale: float | None, init: float, cap: float) -> None:
        super().__init__(dims, scale=scale)
        if init > cap:
            raise ConfigError(f"attention 'qknorm-hs': init is {init:g}, above cap={cap:g}, where it has no gradient")
        self.cap = math.log(cap)
        self.log_scale = nn.Parameter(torch.full((dims.num_heads,), math.log(init)))  # [H]

    def query(self, q: Tensor) -> Tensor:
        log_scale = local(self.log_scale)[:, None, None]  # [H, 1, 1]
        # Without clamp, whose derivative at its bound is 0 in PyTorch 2.15 and 1 before; here it is 1.
        return unit(q) * torch.where(log_scale > self.cap, self.cap, log_scale).exp().to(q.dtype)

    key = staticmethod(unit)  # type: ignore[assignment]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        capped = torch.where(self.log_scale > self.cap, self.cap, self.log_scale)
        return capped.exp()[:, None, None] * (naive.unit(q) @ naive.unit(k)[:, head].mT) * self.scale(q.shape[-1])


@register("qknorm", source="QUEST, table 1, last row", options=(SCALE, _C_Q))
class QKNorm(Score):
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ, C for each head.

    C_q and C_k are learnable for every feature.
    """

    causal = cross = cached = learnable = True
    reads = ()
    shared: ClassVar[bool] = False  # whether one vector serves all heads

    def __init__(self, dims: Dims, *, scale: float | None, init: float | None) -> None:
        super().__init__(dims, scale=scale)
        # √D·cos at the start: D^¼ on either side.
        start = dims.head_dim**0.25 if init is None else init
        heads_q, heads_k = ((), ()) if self.shared else ((dims.num_heads,), (dims.kv_heads,))
        self.query_scale = nn.Parameter(torch.full((*heads_q, dims.head_dim), start))  # [H, D] or [D]
        self.key_scale = nn.Parameter(torch.full((*heads_k, dims.head_dim), start))  # [G, D] or [D]

    def query(self, q: Tensor) -> Tensor:
        return unit(q) * local(self.query_scale).unsqueeze(-2).to(q.dtype)

    def key(self, k: Tensor) -> Tensor:
        return unit(k) * local(self.key_scale).unsqueeze(-2).to(k.dtype)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        q, k = naive.unit(q) * self.query_scale.unsqueeze(-2), naive.unit(k) * self.key_scale.unsqueeze(-2)
        return q @ k[:, head].mT * self.scale(q.shape[-1])


@register("qknorm-ds", source="QUEST, table 1; ViT-22B", options=(SCALE, _C_Q))
class QKNormDS(QKNorm):
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ, C shared by heads."""

    shared = True
