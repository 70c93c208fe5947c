"""What mmsegmentation's Segmenter takes: see devtools.support."""

from pathlib import Path

import torch
from conftest import segmenter
from mmengine.registry import MODELS
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from devtools.support import check


def loss(attention):
    model = MODELS.build(segmenter(type="quest_mmseg.EncoderDecoder", attention=attention))
    sample = SegDataSample()
    sample.set_metainfo({"img_shape": (32, 48), "ori_shape": (32, 48), "pad_shape": (32, 48)})
    sample.set_data({"gt_sem_seg": PixelData(data=torch.randint(5, (1, 32, 48)))})
    return sum(value for key, value in model.loss(torch.randn(2, 3, 32, 48), [sample, sample]).items() if "loss" in key)


def test_the_table_of_support():
    check(Path(__file__).with_name("support.json"), "mmsegmentation", loss, {})
