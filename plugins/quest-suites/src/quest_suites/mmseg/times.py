"""time/mmseg: a training step of Segmenter (forward, loss, backward, SGD), against one of stock mmsegmentation."""

from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.mmengine import time_training
from quest_suites.timing import DEVICE

from .tasks import CONFIGS


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    init_default_scope("mmseg")
    size = (64 if cell.smoke else 512,) * 2
    generator = torch.Generator().manual_seed(cell.seed)
    images = torch.randn(1, 3, *size, generator=generator).to(DEVICE)
    labels = torch.randint(150, (1, *size), generator=generator).to(DEVICE)
    samples = [SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo={"img_shape": size})]

    config = Config.fromfile(CONFIGS / f"segmenter_{cell.task}_mask_1xb8-160k_ade20k-512x512.py").model
    config.backbone.img_size = size

    def loss(model: Any) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            found: Tensor = model.loss(images, samples)["decode.loss_ce"]
        return found

    return time_training(cell, progress, config, "EncoderDecoder", loss)
