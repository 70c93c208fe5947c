"""det/objects: a detector trained and evaluated by mmengine's own Runner on generated images."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn

import quest_mmdet
from quest_suites.contract import Cell, Progress, Result, about
from quest_suites.mmengine import configuration, generated, losses, train

from . import objects

CONFIG = Path(quest_mmdet.__file__).parent / "configs" / "deformable-detr_laptop_objects-64x64.py"


@OPTIM_WRAPPERS.register_module()
class Bfloat16(OptimWrapper):
    """mmengine's AmpOptimWrapper without a scale of the loss, which bfloat16 does not need; that one refuses a CPU."""

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield


def run_objects(cell: Cell, progress: Progress) -> Result:
    """Train the plugin's small Deformable DETR and evaluate it with mmdet's CocoMetric.

    Returns:
        Metrics ``mAP`` and ``mAP50`` in %, and ``largest logit`` of the training; the series ``loss``.
    """
    folder = generated(objects.write, cell)
    config = configuration(CONFIG, cell, folder)
    config.val_evaluator.ann_file = config.test_evaluator.ann_file = str(folder / "validation.json")
    config.optim_wrapper.optimizer.lr = cell.options["lr"]
    config.param_scheduler[1].end = config.train_cfg.max_iters
    if cell.options["precision"] == "bfloat16":
        config.optim_wrapper.type = "Bfloat16"
    config.custom_hooks = [{"type": "quest_mmdet.WatchAttention", "every": 1 if cell.smoke else 10}]
    runner = train(config, cell, progress)
    found = runner.test()
    logits: list[float] = runner.message_hub.get_scalar("train/max_logit").data[0].tolist()
    return Result(
        metrics={
            "mAP": 100 * float(found["coco/bbox_mAP"]),
            "mAP50": 100 * float(found["coco/bbox_mAP_50"]),
            "largest logit": max(logits, key=lambda x: (math.isnan(x), x)),
        },
        series={"loss": losses(runner)},
        details=about(runner.model),
    )
