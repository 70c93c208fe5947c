"""time/graphgps: a step on batches of 32 graphs, forward and backward, against the host's own attention.

The host's own is torch.nn.MultiheadAttention on padded batches, as in PyTorch Geometric and GraphGPS. The plugin's
layer packs ragged batches; the option `packing` forces or forbids it. A task is one layer of attention, or with the
prefix gps- a model of PyTorch Geometric's GPSConv layers, which add a graph convolution to it.
"""

import re

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv, GPSConv

import quest_core
from quest_core import AttentionConfig
from quest_core.drafts import assign
from quest_graphgps.attention import GraphAttention, ragged_plan
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

WIDTH, HEADS, LAYERS = 64, 4, 4


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
    """Time a step of each of two layers in turns; see `quest_suites.timing.against_stock`.

    Returns:
        The result, with ``areas`` (padded over real area of the batch) and ``packed`` (0 or 1) among the metrics.
    """
    nodes = [40, 5, 5] if cell.smoke else sizes(cell.task.removeprefix("gps-"))
    packing, count = cell.options["packing"], torch.tensor(nodes, device=DEVICE)
    hidden = torch.arange(max(nodes), device=DEVICE) >= count[:, None]  # [B, N], the padding
    torch.manual_seed(cell.seed)
    x = torch.randn(sum(nodes), WIDTH, device=DEVICE)
    padded = torch.zeros(*hidden.shape, WIDTH, device=DEVICE)
    padded[~hidden] = x
    graph = torch.arange(len(nodes), device=DEVICE).repeat_interleave(count)
    # Each graph is a chain, with edges both ways.
    first = torch.arange(len(graph) - 1, device=DEVICE)[graph[1:] == graph[:-1]]
    edges = torch.stack([torch.cat([first, first + 1]), torch.cat([first + 1, first])])  # [2, E]

    def make(attention: str | None) -> Step:
        if cell.task.startswith("gps-"):
            model: nn.Module = Model().to(DEVICE).train()
            if attention:
                model, _ = quest_core.inject(model, attention, fresh=True)
            return training_step(model, lambda: model(x, edges, graph).square().mean())
        layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(DEVICE)
        if attention:
            assign(GraphAttention.adopt(layer, AttentionConfig.parse(attention), **GraphAttention.sizes(layer)))

        def loss() -> Tensor:
            given = padded.detach().requires_grad_()
            out = layer(given, given, given, key_padding_mask=hidden, need_weights=False)[0]
            return out[~hidden].square().sum()

        return training_step(layer, loss)

    before, GraphAttention.packing = GraphAttention.packing, packing
    try:
        result = against_stock(cell, progress, make)
        plan = ragged_plan(hidden, WIDTH // HEADS, always=packing == "always")
    finally:
        GraphAttention.packing = before
    result.metrics["areas"] = len(nodes) * max(nodes) ** 2 / sum(n * n for n in nodes)
    result.metrics["packed"] = float(packing != "never" and plan is not None)
    return result


class Model(nn.Module):
    """GPS layers (Rampášek et al., 2022) with GINE convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(
            GPSConv(
                WIDTH,
                GINEConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
                heads=HEADS,
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        """Nodes [N, E] to nodes; `edges` [2, edges] join them, and `graph` [N] says which graph each belongs to."""
        for layer in self.layers:
            x = layer(x, edges, graph, edge_attr=self.edge.expand(edges.shape[1], -1))
        return x
