"""What timm's ViT takes: see devtools.support."""

from pathlib import Path

import timm
import torch

import quest_timm  # noqa: F401
from devtools.support import check


def test_the_table_of_support():
    def loss(attention):
        sizes = {"img_size": 32, "embed_dim": 32, "num_heads": 4, "depth": 2, "num_classes": 2}
        model = timm.create_model("vit_tiny_patch16_224", attention=attention, **sizes)
        return model(torch.randn(2, 3, 32, 32)).pow(2).mean()

    check(Path(__file__).with_name("support.json"), "timm", loss, {})
