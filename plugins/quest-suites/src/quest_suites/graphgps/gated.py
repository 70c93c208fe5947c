"""The sum over neighbours of a gated graph convolution, block by block of edges, so that a block stays in the cache.

Ordinary message passing writes a tensor with one row per edge in every step. On a CPU, dense graphs such as PATTERN's
spend most of their time on that memory traffic. `gated_sum` writes one such tensor in the forward pass and one in the
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 4096
"""Edges of a block: with 64 features, 1 MiB for each tensor."""


class _GatedSum(torch.autograd.Function):
    """See `gated_sum`."""

    @staticmethod
    def forward(
        ctx: Any, edges: Tensor, to: Tensor, fro: Tensor, values: Tensor, source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.empty_like(edges)
        total, weight = torch.zeros_like(values), torch.zeros_like(values)
        for begin in range(0, len(edges), BLOCK):
            part = slice(begin, begin + BLOCK)
            i, j = target[part], source[part]
            score = torch.add(edges[part], to.index_select(0, i), out=scores[part])
            score += fro.index_select(0, j)
            gate = score.sigmoid()
            weight.index_add_(0, i, gate)
            total.index_add_(0, i, gate.mul_(values.index_select(0, j)))
        ctx.save_for_backward(scores, values, source, target)
        return scores, total, weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, grad_total: Tensor, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
        scores, values, source, target = ctx.saved_tensors
        grad_edges = torch.empty_like(scores)
        grad_to, grad_fro, grad_values = (torch.zeros_like(values) for _ in range(3))
        for begin in range(0, len(scores), BLOCK):
            part = slice(begin, begin + BLOCK)
            i, j = target[part], source[part]
            gate = scores[part].sigmoid()
            grad = grad_total.index_select(0, i)
            grad_values.index_add_(0, j, grad * gate)
            grad *= values.index_select(0, j)
            grad += grad_weight.index_select(0, i)
            grad *= gate
            grad *= gate.neg_().add_(1)
            grad = torch.add(grad, grad_scores[part], out=grad_edges[part])
            grad_to.index_add_(0, i, grad)
            grad_fro.index_add_(0, j, grad)
        return grad_edges, grad_to, grad_fro, grad_values, None, None


def gated_sum(
    edges: Tensor, to: Tensor, fro: Tensor, values: Tensor, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of edges j → i and the gated sums over neighbours.

    Args:
        edges: c [edges, E].
        to: d [T, E], at the end of an edge.
        fro: e [T, E], at its beginning.
        values: b [T, E].
        source: j [edges].
        target: i [edges].

    Returns:
        Scores s = c + d_i + e_j [edges, E], Σ_j σ(s) ⊙ b_j and Σ_j σ(s), both [T, E].
    """
    found: tuple[Tensor, Tensor, Tensor] = _GatedSum.apply(edges, to, fro, values, source, target)
    return found
