"""What mmdetection's DETR takes: see devtools.support."""

from pathlib import Path

import torch
from conftest import DETR, samples, small, without_dropout
from mmdet.registry import MODELS

from devtools.support import check


def loss(attention):
    config = small(DETR, type="quest_mmdet.DETR", attention=attention)
    losses = MODELS.build(without_dropout(config)).loss(torch.randn(2, 3, 32, 32), samples(side=32))
    return sum(value for key, value in losses.items() if "loss" in key)


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "mmdetection", loss, {})
