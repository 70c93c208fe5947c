"""Normalisers: logits to weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Part
from .base import Dims, Normaliser, merge_causal


class Softmax(Normaliser):
    """exp(l) / Σ exp(l) over the visible keys, through the fastest scaled_dot_product_attention that applies."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        # The kernels align causal masks at the first key; ours at the last, which differs for a cached prefix.
        if is_causal and (mask is not None or n != m):
            mask, is_causal = (None, False) if n == 1 and mask is None else (merge_causal(mask, n, m, q.device), False)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def weights(self, logits: Tensor, *, mask: Tensor | None, is_causal: bool) -> Tensor:
        if is_causal:
            mask = merge_causal(mask, logits.shape[-2], logits.shape[-1], logits.device)
        if mask is None:
            return logits.softmax(-1)
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        blind = (logits == -math.inf).all(-1, keepdim=True)  # [B, H, N, 1]: rows with no visible key
        return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


PARTS = (Part("softmax", "normaliser", "exp(l) / Σ exp(l)", "Vaswani et al., 2017", Softmax),)
