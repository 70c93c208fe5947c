"""What mmsegmentation's Segmenter takes: see devtools.support."""

from pathlib import Path

import torch
from conftest import sample, segmenter
from mmengine.registry import MODELS

from devtools.support import check


def loss(attention):
    model = MODELS.build(segmenter(attention=attention))
    losses = model.loss(torch.randn(2, 3, 32, 48), [sample(), sample()])
    return sum(value for key, value in losses.items() if "loss" in key)


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "mmsegmentation", loss, {})
