"""time/mmdet: a training step of the small Deformable DETR (forward, losses, backward, SGD), against stock mmdet's."""

from typing import Any

import torch
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.mmengine import time_training
from quest_suites.timing import DEVICE

from .tasks import CONFIG


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    init_default_scope("mmdet")
    size = (64 if cell.smoke else 256,) * 2
    generator = torch.Generator().manual_seed(cell.seed)
    images = torch.randn(2, 3, *size, generator=generator).to(DEVICE)
    samples = [DetDataSample(metainfo=dict.fromkeys(("img_shape", "batch_input_shape"), size)) for _ in images]
    for sample in samples:
        corners = torch.rand(4, 4, generator=generator) * size[0] / 2
        corners[:, 2:] += size[0] / 2
        sample.gt_instances = InstanceData(bboxes=corners.to(DEVICE), labels=torch.arange(4, device=DEVICE))

    def loss(model: Any) -> Tensor:
        found: Tensor = model.parse_losses(model.loss(images, samples))[0]
        return found

    return time_training(cell, progress, Config.fromfile(CONFIG).model, "DeformableDETR", loss)
