"""time/mmseg: a training step of Segmenter (forward, loss, backward, SGD), against one of stock mmsegmentation."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import beside_stock

from .tasks import CONFIGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.beside_stock`."""
    options = {**cell.options, **({"size": 64, "rounds": 2} if cell.smoke else {})}
    init_default_scope("mmseg")
    logging.getLogger("mmengine").setLevel(logging.ERROR)
    size, generator = (options["size"],) * 2, torch.Generator().manual_seed(cell.seed)
    images = torch.randn(options["batch"], 3, *size, generator=generator).to(DEVICE)
    labels = [torch.randint(150, (1, *size), generator=generator).to(DEVICE) for _ in range(options["batch"])]
    samples = [SegDataSample(gt_sem_seg=PixelData(data=x), metainfo={"img_shape": size}) for x in labels]
    steps = [partial(step, *build(cell, size, attention), images, samples) for attention in (None, cell.attention)]
    return beside_stock(*steps, rounds=options["rounds"], progress=progress)


def build(cell: Cell, size: tuple[int, int], attention: str | None) -> tuple[Any, torch.optim.Optimizer]:
    """Return a Segmenter and its optimizer; stock without `attention`."""
    name = cell.task.removeprefix("vit-")
    config = Config.fromfile(CONFIGS / f"segmenter_vit-{name}_mask_1xb8-160k_ade20k-512x512.py")
    config.model.attention = attention
    if attention is None:
        config.model.type = "EncoderDecoder"
        del config.model.attention
    config.model.backbone.img_size = size
    torch.manual_seed(cell.seed)
    model = MODELS.build(config.model)
    model.init_weights()
    return model.to(DEVICE).train(), torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def step(model: Any, optimizer: torch.optim.Optimizer, images: torch.Tensor, samples: list[SegDataSample]) -> None:
    """Train on one batch."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss = model.loss(images, samples)["decode.loss_ce"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
