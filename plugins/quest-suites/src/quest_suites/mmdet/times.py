"""time/mmdet: a training step of the small Deformable DETR (forward, losses, backward, SGD), against stock mmdet's."""

import logging

import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

from .tasks import CONFIG


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    init_default_scope("mmdet")
    logging.getLogger("mmengine").setLevel(logging.ERROR)
    size = (64 if cell.smoke else 256,) * 2
    generator = torch.Generator().manual_seed(cell.seed)
    images = torch.randn(2, 3, *size, generator=generator).to(DEVICE)
    samples = [DetDataSample(metainfo=dict.fromkeys(("img_shape", "batch_input_shape"), size)) for _ in images]
    for sample in samples:
        corners = torch.rand(4, 4, generator=generator) * size[0] / 2
        corners[:, 2:] += size[0] / 2
        sample.gt_instances = InstanceData(bboxes=corners.to(DEVICE), labels=torch.arange(4, device=DEVICE))

    def make(attention: str | None) -> Step:
        config = Config.fromfile(CONFIG).model
        config.attention = attention
        if attention is None:
            config.type = "DeformableDETR"
            del config.attention
        model = MODELS.build(config)
        model.init_weights()
        model.to(DEVICE).train()

        def loss() -> Tensor:
            found: Tensor = model.parse_losses(model.loss(images, samples))[0]
            return found

        return training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))

    return against_stock(cell, progress, make)
