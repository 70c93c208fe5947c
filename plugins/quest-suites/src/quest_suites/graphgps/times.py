"""time/graphgps: a step on batches of 32 graphs, forward and backward, against the host's own attention.

The host's own is torch.nn.MultiheadAttention on padded batches, as in PyTorch Geometric and GraphGPS. The plugin's
layer packs ragged batches; the option `packing` forces or forbids it. A task is one layer of attention, or with the
prefix gps- a model of PyTorch Geometric's GPSConv layers, which add a graph convolution to it.
"""

from __future__ import annotations

import copy
import re
from functools import partial

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv, GPSConv

import quest_core
from quest_core import AttentionConfig
from quest_core.drafts import assign
from quest_graphgps.attention import GraphAttention, ragged_plan
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import beside_stock

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
    """Time a step of each of two layers in turns; see `quest_suites.timing.beside_stock`.

    Args:
        cell: `task` names the batch.
        progress: called after each round.

    Returns:
        The result, with ``areas`` (padded over real area of the batch) and ``packed`` (0 or 1) among the metrics.
    """
    rounds, nodes = cell.options["rounds"], sizes(cell.task.removeprefix("gps-"))
    if cell.smoke:
        rounds, nodes = 2, [40, 5, 5]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, GraphAttention.packing = GraphAttention.packing, cell.options["packing"]
    try:
        torch.manual_seed(cell.seed)
        hidden = torch.arange(max(nodes), device=device) >= torch.tensor(nodes, device=device)[:, None]  # [B, N]
        x = torch.randn(sum(nodes), WIDTH, device=device)
        if cell.task.startswith("gps-"):
            host: nn.Module = Model(cell.options["dropout"]).to(device)
            own, _ = quest_core.inject(copy.deepcopy(host), cell.attention, fresh=True)
            graph = torch.arange(len(nodes), device=device).repeat_interleave(torch.tensor(nodes, device=device))
            # Each graph is a chain, with edges both ways.
            edges = torch.stack([torch.arange(len(graph) - 1, device=device)[graph[1:] == graph[:-1]]] * 2)  # [2, E]
            edges = torch.cat(
                [edges + torch.tensor([[0], [1]]).to(edges), edges + torch.tensor([[1], [0]]).to(edges)], 1
            )
            steps = [partial(model_step, model.train(), x, edges, graph) for model in (host, own)]
        else:
            host = nn.MultiheadAttention(WIDTH, HEADS, dropout=cell.options["dropout"], batch_first=True).to(device)
            padded = torch.zeros(*hidden.shape, WIDTH, device=device)
            padded[~hidden] = x
            own = copy.deepcopy(host)
            assign(GraphAttention.adopt(own, AttentionConfig.parse(cell.attention), **GraphAttention.sizes(own)))
            steps = [partial(step, layer, padded, hidden) for layer in (host, own)]
        result = beside_stock(*steps, rounds=rounds, progress=progress)
        result.metrics["areas"] = len(nodes) * max(nodes) ** 2 / sum(n * n for n in nodes)
        always, head_dim = cell.options["packing"] == "always", WIDTH // HEADS
        packs = cell.options["packing"] != "never" and ragged_plan(hidden, head_dim, always=always) is not None
        result.metrics["packed"] = float(packs)
    finally:
        GraphAttention.packing = before
    return result


def step(layer: nn.Module, x: Tensor, hidden: Tensor) -> None:
    """One forward and backward pass on nodes [B, N, E], of which `hidden` [B, N] are padding."""
    x = x.detach().requires_grad_()
    out = layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0][~hidden]
    out.square().sum().backward()


class Model(nn.Module):
    """GPS layers (Rampášek et al., 2022) with GINE convolutions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.edge = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(
            GPSConv(
                WIDTH,
                GINEConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
                heads=HEADS,
                attn_kwargs={"dropout": dropout},
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        """Nodes [N, E] to nodes; `edges` [2, edges] join them, and `graph` [N] says which graph each belongs to."""
        for layer in self.layers:
            x = layer(x, edges, graph, edge_attr=self.edge.expand(edges.shape[1], -1))
        return x


def model_step(model: nn.Module, x: Tensor, edges: Tensor, graph: Tensor) -> None:
    """One forward and backward pass."""
    model(x, edges, graph).square().mean().backward()
    model.zero_grad()
