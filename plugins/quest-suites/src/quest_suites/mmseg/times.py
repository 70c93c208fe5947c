"""time/mmseg: a training step of Segmenter (forward, loss, backward, SGD), against one of stock mmsegmentation."""

import logging

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

from .tasks import CONFIGS


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    init_default_scope("mmseg")
    logging.getLogger("mmengine").setLevel(logging.ERROR)
    size = (64 if cell.smoke else 512,) * 2
    generator = torch.Generator().manual_seed(cell.seed)
    images = torch.randn(1, 3, *size, generator=generator).to(DEVICE)
    labels = torch.randint(150, (1, *size), generator=generator).to(DEVICE)
    samples = [SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo={"img_shape": size})]

    def make(attention: str | None) -> Step:
        name = cell.task.removeprefix("vit-")
        config = Config.fromfile(CONFIGS / f"segmenter_vit-{name}_mask_1xb8-160k_ade20k-512x512.py").model
        config.attention = attention
        if attention is None:
            config.type = "EncoderDecoder"
            del config.attention
        config.backbone.img_size = size
        model = MODELS.build(config)
        model.init_weights()
        model.to(DEVICE).train()

        def loss() -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                found: Tensor = model.loss(images, samples)["decode.loss_ce"]
            return found

        return training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))

    return against_stock(cell, progress, make)
