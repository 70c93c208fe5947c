"""What PyTorch's own Transformer takes: see devtools.support."""

from pathlib import Path

import torch
from models import encoder

import quest_core
from devtools.support import check


def loss(attention, dropout=0.1):
    model, _ = quest_core.inject(encoder(dropout=dropout), attention)
    return model(torch.randn(2, 9, 16)).pow(2).mean()


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "PyTorch", loss, {"`dropout=0`": {"dropout": 0.0}})
