"""What mmsegmentation's Segmenter takes: see devtools.support."""

from pathlib import Path

import torch
from conftest import segmenter
from mmengine.registry import MODELS
from mmseg.structures import SegDataSample

from devtools.support import check


def train(attention):
    model = MODELS.build(segmenter(type="quest_mmseg.EncoderDecoder", attention=attention))
    sample = SegDataSample()
    sample.set_metainfo({"img_shape": (32, 48), "ori_shape": (32, 48), "pad_shape": (32, 48)})
    sample.set_data({"gt_sem_seg": _labels()})
    loss = sum(value for key, value in model.loss(torch.randn(2, 3, 32, 48), [sample, sample]).items() if "loss" in key)
    loss.backward()
    assert loss.isfinite()


def _labels():
    from mmengine.structures import PixelData

    return PixelData(data=torch.randint(5, (1, 32, 48)))


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "mmsegmentation", train, {})
