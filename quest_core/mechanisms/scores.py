"""Scores: how queries and keys meet. Formulas: [Q] is QUEST, arXiv 2604.00199."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops import (
    local,
    unit,
)
from .base import (
    Dims,
    Score,
)
from .part import POINTWISE, Option, Part

SCALE = Option("scale", float, None, "factor on the logits in place of the score's own", nullable=True)
_START = "expected norm of a head's {} in a fresh model; null keeps the host's initialization"
QUERY_START = Option("init", float, None, _START.format("queries"), 1e-6, nullable=True, starts="q")
KEY_START = Option("key_init", float, None, _START.format("keys"), 1e-6, nullable=True, starts="k")


class Standard(Score):
    """q kᵀ / √D (Vaswani et al., 2017)."""

    def __init__(self, dims: Dims | None, *, scale: float | None = None) -> None:
        super().__init__(dims, scale=scale)
        self.standard_scale = None if dims is None else dims.standard_scale

    def default_scale(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.standard_scale is None else self.standard_scale


class Quest(Score):
    """q k̄ᵀ with no other scale: each query keeps its own sharpness, no key can grow loud ([Q], section 2.1)."""

    def key(self, k: Tensor) -> Tensor:
        return unit(k)


class QNorm(Score):
    """q̄ kᵀ with no other scale ([Q], the ablation of table 1)."""

    def query(self, q: Tensor) -> Tensor:
        return unit(q)


class QKNormHS(Score):
    """C_h · q̄ k̄ᵀ, one learnable scale a head, stored as its logarithm and capped ([Q], table 1, after Swin v2)."""

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

    def key(self, k: Tensor) -> Tensor:
        return unit(k)


class QKNorm(Score):
    """(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ with C_q, C_k learnable for every head and feature ([Q], table 1, last row).

    With `shared`, one vector serves all heads.
    """

    def __init__(self, dims: Dims, *, scale: float | None, init: float | None, shared: bool = False) -> None:
        super().__init__(dims, scale=scale)
        # √D·cos at the start: D^¼ on either side.
        start = dims.head_dim**0.25 if init is None else init
        heads_q, heads_k = ((), ()) if shared else ((dims.num_heads,), (dims.kv_heads,))
        self.query_scale = nn.Parameter(torch.full((*heads_q, dims.head_dim), start))  # [H, D] or [D]
        self.key_scale = nn.Parameter(torch.full((*heads_k, dims.head_dim), start))  # [G, D] or [D]

    def query(self, q: Tensor) -> Tensor:
        return unit(q) * local(self.query_scale).unsqueeze(-2).to(q.dtype)

    def key(self, k: Tensor) -> Tensor:
        return unit(k) * local(self.key_scale).unsqueeze(-2).to(k.dtype)


QKNormDS = partial(QKNorm, shared=True)

STARTS = (SCALE, QUERY_START, KEY_START)
_QNORMSTARTS = (SCALE, replace(QUERY_START, name="query_init"), replace(KEY_START, name="init"))
_C_H = (
    SCALE,
    Option("init", float, 10.0, "starting value of the scale C_h of every head", 1e-6, starts="own"),
    Option("cap", float, 100.0, "largest value of C_h", minimum=1e-6),
)
_C_Q = Option("init", float, None, "starting value of C_q and C_k; null means D^¼", 1e-6, nullable=True, starts="own")
_LEARNED = {"learnable": True, **POINTWISE}
_QK = "(C_q ⊙ q̄)(C_k ⊙ k̄)ᵀ, C "

PARTS = (
    Part("standard", "score", "q kᵀ / √D", "Vaswani et al., 2017", Standard, (SCALE,), **POINTWISE),
    Part("quest", "score", "q k̄ᵀ", "QUEST, section 2.1", Quest, STARTS, unit_keys=True, **POINTWISE),
    Part("qnorm", "score", "q̄ kᵀ", "QUEST, table 1", QNorm, _QNORMSTARTS, **POINTWISE),
    Part("qknorm-hs", "score", "C_h · q̄ k̄ᵀ", "QUEST, table 1; Swin v2", QKNormHS, _C_H, unit_keys=True, **_LEARNED),
    Part("qknorm-ds", "score", _QK + "shared by heads", "QUEST, table 1; ViT-22B", QKNormDS, (SCALE, _C_Q), **_LEARNED),
    Part("qknorm", "score", _QK + "for each head", "QUEST, table 1, last row", QKNorm, (SCALE, _C_Q), **_LEARNED),
)
