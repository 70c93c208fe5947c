"""time/graphgps: one attention layer on batches of 32 graphs, forward and backward, against the host's own.

The host's own is torch.nn.MultiheadAttention on padded batches, as in PyTorch Geometric and GraphGPS. The plugin's
layer packs ragged batches; the option `packing` forces or forbids it.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor, nn

from quest_core.benchmarks import Cell, Progress, Result, beside_stock

from .. import attention
from ..attention import GraphAttention

WIDTH, HEADS = 64, 4


def sizes(task: str) -> list[int]:
    """Return the nodes of each graph of a batch."""
    generator = torch.Generator().manual_seed(0)

    def normal(mean: float, spread: float, least: int, most: int) -> list[int]:
        drawn = torch.randn(32, generator=generator) * spread + mean
        return [int(nodes) for nodes in drawn.clamp(least, most)]

    if match := re.fullmatch(r"(\d+)-among-(\d+)", task):
        return [int(match[1]), *[int(match[2])] * 31]
    likes = {"zinc": (23, 4.5, 9, 37), "pattern": (119, 25, 44, 188), "peptides": (151, 84, 8, 444)}
    return [150, *normal(*likes["zinc"])[1:]] if task == "molecules-and-a-peptide" else normal(*likes[task])


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two layers in turns; see `quest_core.benchmarks.beside_stock`.

    Args:
        cell: `task` names the batch.
        progress: called after each round.

    Returns:
        The result, with ``areas`` (padded over real area of the batch) and ``packed`` (0 or 1) among the metrics.
    """
    rounds, nodes = (2, [40, 5, 5]) if cell.smoke else (cell.options["rounds"], sizes(cell.task))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = {"auto": attention.RAGGED, "always": 0.0, "never": float("inf")}
    before, attention.RAGGED = attention.RAGGED, limits[cell.options["packing"]]
    try:
        torch.manual_seed(cell.seed)
        host = nn.MultiheadAttention(WIDTH, HEADS, dropout=cell.options["dropout"], batch_first=True).to(device)
        own = GraphAttention.from_torch(host, cell.attention)
        hidden = torch.arange(max(nodes), device=device) >= torch.tensor(nodes, device=device)[:, None]  # [B, N]
        x = torch.zeros(*hidden.shape, WIDTH, device=device)
        x[~hidden] = torch.randn(sum(nodes), WIDTH, device=device)
        result = beside_stock(
            *(partial(step, layer, x, hidden) for layer in (host, own)), rounds=rounds, progress=progress
        )
        result.metrics["areas"] = len(nodes) * max(nodes) ** 2 / sum(n * n for n in nodes)
        result.metrics["packed"] = float(attention.ragged_plan(hidden) is not None)
    finally:
        attention.RAGGED = before
    return result


def step(layer: nn.Module, x: Tensor, hidden: Tensor) -> None:
    """One forward and backward pass on nodes [B, N, E], of which `hidden` [B, N] are padding."""
    x = x.detach().requires_grad_()
    out = layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0][~hidden]
    out.square().sum().backward()
