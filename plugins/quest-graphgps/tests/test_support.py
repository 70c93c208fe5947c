"""What a model of PyTorch Geometric's GPSConv takes: see devtools.support."""

from pathlib import Path

import torch
from torch import nn
from torch_geometric.nn import GINConv, GPSConv

import quest_core
import quest_graphgps  # noqa: F401
from devtools.support import check


def loss(attention):
    layers = nn.ModuleList(GPSConv(16, GINConv(nn.Linear(16, 16)), heads=4) for _ in range(2))
    layers, _ = quest_core.inject(layers, attention)
    x, edges, batch = torch.randn(12, 16), torch.randint(12, (2, 30)), torch.tensor([0] * 5 + [1] * 7)
    for layer in layers:
        x = layer(x, edges, batch)
    return x.pow(2).mean()


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "PyTorch Geometric", loss, {})
