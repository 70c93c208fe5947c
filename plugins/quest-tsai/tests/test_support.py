"""What tsai's TSTPlus takes: see devtools.support."""

from pathlib import Path

import torch
from tsai.models.TSTPlus import TSTPlus

import quest_tsai  # noqa: F401
from devtools.support import check


def test_the_table_of_support():
    def loss(attention, **options):
        return TSTPlus(3, 2, 12, attention=attention, **options)(torch.randn(4, 3, 12)).pow(2).mean()

    settings = {
        "`res_attention=False`": {"res_attention": False},
        "`attn_dropout=0`": {"attn_dropout": 0.0},
        "`res_attention=False, attn_dropout=0`": {"res_attention": False, "attn_dropout": 0.0},
    }
    check(Path(__file__).with_name("support.json"), "tsai", loss, settings)
