"""det/objects: a detector trained and evaluated by mmengine's own Runner on generated images."""

from __future__ import annotations

from pathlib import Path

from mmengine.config import Config

import quest_mmdet
from quest_core.hosts.inject import REPORT
from quest_suites.contract import Cell, Progress, Result
from quest_suites.mmengine import losses, train

from . import objects

CONFIG = Path(quest_mmdet.__file__).parent / "configs" / "deformable-detr_laptop_objects-64x64.py"
SMOKE_ITERATIONS, SMOKE_IMAGES = 4, 8


def run_objects(cell: Cell, progress: Progress) -> Result:
    """Train the plugin's small Deformable DETR and evaluate it with mmdet's CocoMetric.

    Args:
        cell: its options are those of the suite; `data` is not used.

    Returns:
        Metrics ``mAP`` and ``mAP50`` in %; the series ``loss``.
    """
    options, folder = cell.options, cell.workdir / "objects"
    images = (SMOKE_IMAGES, SMOKE_IMAGES) if cell.smoke else (options["train_images"], options["validation_images"])
    objects.write(folder, train=images[0], validation=images[1])  # the same for every attention and seed
    iterations = min(SMOKE_ITERATIONS, options["iterations"]) if cell.smoke else options["iterations"]

    config = Config.fromfile(CONFIG)
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(folder)
    config.val_evaluator.ann_file = config.test_evaluator.ann_file = str(folder / "validation.json")
    config.train_dataloader.batch_size = options["batch_size"]
    config.optim_wrapper.optimizer.lr = options["lr"]
    config.param_scheduler[1].end = iterations
    runner = train(config, cell, iterations, progress)
    found = runner.test()
    return Result(
        metrics={"mAP": 100 * float(found["coco/bbox_mAP"]), "mAP50": 100 * float(found["coco/bbox_mAP_50"])},
        series={"loss": losses(runner)},
        details={
            "injected": str(getattr(runner.model, REPORT)),
            "parameters": sum(p.numel() for p in runner.model.parameters()),
        },
    )
