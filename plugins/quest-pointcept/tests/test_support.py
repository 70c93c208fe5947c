"""What torch-pointcloud's Point Transformer V3 takes: see devtools.support."""

from pathlib import Path

import pytest
from clouds import clouds, segmentation

import quest_pointcept  # noqa: F401
from devtools.support import check

PATCHES = {"encoder_patch_size": (1024, 1024), "decoder_patch_size": (1024,)}


def loss(attention):
    return segmentation(**PATCHES, attention=attention)(*clouds(60, 45)).pow(2).mean()


@pytest.mark.slow
def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "Pointcept", loss, {"`aft-conv(dims=1)`": {"options": "dims=1"}})
