"""What PyTorch's own Transformer takes: see devtools.support."""

from pathlib import Path

import torch
from torch import nn

import quest_core
from devtools.support import check


def loss(attention, **layer):
    made = nn.TransformerEncoderLayer(16, 4, batch_first=True, **layer)
    model, _ = quest_core.inject(nn.TransformerEncoder(made, 2, enable_nested_tensor=False), attention)
    return model(torch.randn(2, 9, 16)).pow(2).mean()


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "PyTorch", loss, {"`dropout=0`": {"dropout": 0.0}})
