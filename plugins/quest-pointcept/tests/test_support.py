"""What torch-pointcloud's Point Transformer V3 takes: see devtools.support."""

from pathlib import Path

from clouds import clouds
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

import quest_pointcept  # noqa: F401
from devtools.support import check

SMALL = {
    "in_channels": 4,
    "num_classes": 5,
    "strides": (2,),
    "encoder_depths": (2, 2),
    "encoder_channels": (16, 32),
    "encoder_num_heads": (2, 4),
    "encoder_patch_size": (1024, 1024),
    "decoder_depths": (1,),
    "decoder_channels": (16,),
    "decoder_num_heads": (2,),
    "decoder_patch_size": (1024,),
}


def train(attention):
    loss = PointTransformerV3Segmentation(**SMALL, attention=attention)(*clouds(60, 45)).pow(2).mean()
    loss.backward()
    assert loss.isfinite()


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "Pointcept", train, {"`aft-conv(dims=1)`": {"options": "dims=1"}})
