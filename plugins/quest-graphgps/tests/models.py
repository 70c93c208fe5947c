"""Small models and batches of graphs for the tests."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.nn import GINEConv, GPSConv, TransformerConv
from yacs.config import CfgNode

from quest_suites.graphgps import gps
from quest_suites.graphgps.data import add_eigenvectors

SIZES = (5, 9, 7)
RAGGED = (24, 2, 1, 3, 2, 4)
"""Padded, six times the area of the graphs themselves."""


class ConvModel(nn.Module):
    """PyTorch Geometric's own layers, as its examples stack them."""

    def __init__(self, dropout: float, channels: int = 16, heads: int = 4, attention: str | None = None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            GPSConv(
                channels,
                GINEConv(nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))),
                heads=heads,
                dropout=0.1,
                attn_kwargs={"dropout": dropout, "attention": attention},
            )
            for _ in range(2)
        )

    def forward(self, x, edge_index, batch, edge_attr):
        for conv in self.convs:
            x = conv(x, edge_index, batch, edge_attr=edge_attr)
        return x


class EdgeModel(nn.Module):
    """Two layers of attention on edges, with their features."""

    def __init__(self, dropout: float, channels: int = 16, heads: int = 4) -> None:
        super().__init__()
        size = channels // heads
        self.convs = nn.ModuleList(
            TransformerConv(channels, size, heads, beta=True, dropout=dropout, edge_dim=channels) for _ in range(2)
        )

    def forward(self, x, edge_index, batch, edge_attr):
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr)
        return x


def graph(nodes: int, channels: int | None = 16, dtype: torch.dtype = torch.float32) -> Data:
    """A ring of nodes with random features, of three kinds where `channels` is None."""
    ring = torch.arange(nodes)
    edges = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])], dim=1)
    if channels is None:
        data = Data(x=nn.functional.one_hot(torch.randint(3, (nodes,)), 3).float(), edge_index=edges)
        data.y = torch.randint(2, (nodes,))
        return add_eigenvectors(data, 4)
    x = torch.randn(nodes, channels, dtype=dtype)
    return Data(x=x, edge_index=edges, edge_attr=torch.randn(edges.shape[1], channels, dtype=dtype))


def conv_inputs(sizes: Sequence[int] = SIZES):
    batch = Batch.from_data_list([graph(n) for n in sizes])
    return batch.x, batch.edge_index, batch.batch, batch.edge_attr


SMALL = """
dataset: {node_encoder: True, node_encoder_name: LapPE, node_encoder_bn: False,
          edge_encoder: True, edge_encoder_name: DummyEdge, edge_encoder_bn: False}
posenc_LapPE: {enable: True, model: DeepSet, dim_pe: 4, layers: 2, eigen: {max_freqs: 4}}
model: {type: GPSModel, loss_fun: weighted_cross_entropy}
gt: {layer_type: CustomGatedGCN+Transformer, layers: 2, n_heads: 4, dim_hidden: 16, dropout: 0.1, attn_dropout: 0.3}
gnn: {dim_inner: 16, head: inductive_node, layers_pre_mp: 0}
share: {dim_in: 3, dim_out: 2}
accelerator: cpu
"""


def configure(**gt) -> None:
    """A small GraphGPS config: PATTERN's, shrunk."""
    set_cfg(cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(SMALL))
    for key, value in gt.items():
        cfg.gt[key] = value


class GymModel(nn.Module):
    """The network that the config names, on the features of a batch: x and edges are its floating-point inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gps.GPSModel(3, 1)

    def forward(self, x, template):
        batch = template.clone()
        batch.x = x
        batch.EigVecs, batch.EigVals = batch.EigVecs.to(x.dtype), batch.EigVals.to(x.dtype)
        return self.net(batch)[0]


def gym_inputs(sizes: Sequence[int] = SIZES):
    batch = Batch.from_data_list([graph(n, None) for n in sizes])
    return batch.x, batch


SPLITS = (("train", 24), ("val", 8), ("test", 8))


def write_zinc(folder: Path) -> None:
    """Random trees in the layout of ZINC's download, where PyTorch Geometric's ZINC and GraphGPS look for it."""
    raw = folder / "ZINC" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for split, graphs in SPLITS:
        molecules = []
        for _ in range(graphs):
            n = int(torch.randint(10, 30, (1,), generator=generator))
            bonds = torch.zeros(n, n, dtype=torch.long)
            for i in range(1, n):
                j = int(torch.randint(i, (1,), generator=generator))
                bonds[i, j] = bonds[j, i] = int(torch.randint(1, 4, (1,), generator=generator))
            types = torch.randint(28, (n,), generator=generator)
            target = torch.randn(1, generator=generator)
            molecules.append({"atom_type": types, "bond_type": bonds, "logP_SA_cycle_normalized": target})
        (raw / f"{split}.pickle").write_bytes(pickle.dumps(molecules))
        (raw / f"{split}.index").write_text(",".join(map(str, range(graphs))) + "\n")


def write_superpixels(folder: Path, name: str) -> None:
    """Rings in the layout of MNIST's and CIFAR10's download, as PyTorch Geometric's GNNBenchmarkDataset reads it."""
    raw = folder / "GNNBenchmarkDataset" / name / "raw"
    raw.mkdir(parents=True)
    torch.manual_seed(0)
    splits = []
    for _, graphs in SPLITS:
        split = []
        for i in range(graphs):
            edges = graph(12).edge_index
            colors, y = torch.rand(12, 3 if name == "CIFAR10" else 1), torch.tensor([i % 10])
            edge_attr, pos = torch.rand(edges.shape[1]), torch.rand(12, 2)
            split.append({"x": colors, "edge_index": edges, "edge_attr": edge_attr, "y": y, "pos": pos})
        splits.append(split)
    torch.save(splits, raw / f"{name}_v2.pt")


def trainer(**options: object) -> Trainer:
    """Lightning's trainer, which writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", devices=1, **(quiet | options))
