"""Segmenter trained and evaluated by mmengine's own Runner: on ADE20K, on CamVid, and on generated scenes.

Corrupted data follow the protocol in quest_suites.mmseg.corruptions. Every cell runs a config of quest_mmseg/configs
with the options of the suite applied.
"""

import statistics
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.runner import TestLoop

import quest_mmseg
from quest_suites.contract import Cell, Progress, Result, about
from quest_suites.mmengine import SMOKE_IMAGES, configuration, generated, losses, train

from . import scenes
from .corruptions import CORRUPTIONS, Corrupt, distort, severities

CONFIGS = Path(quest_mmseg.__file__).parent / "configs"
SMOKE_CORRUPTIONS = ("gaussian_noise", "fog")


def run_shapes(cell: Cell, progress: Progress) -> Result:
    """seg/shapes: train on generated scenes, evaluate on clean and corrupted ones.

    Returns:
        Metrics ``mIoU`` and ``mIoU corrupted`` (the mean over the corruptions), ``aAcc`` and
        ``mIoU corrupted/<name>``, the mean over its severities, all in %; the series ``loss``.
    """
    config = configuration(CONFIGS / "segmenter_laptop_scenes-64x64.py", cell, generated(scenes.write, cell))
    config.val_dataloader.batch_size = config.test_dataloader.batch_size = 16  # scenes are of one size
    schedule(config, cell)
    return train_and_evaluate(config, cell, progress, share=0.7, with_corruptions=True)


def run_camvid(cell: Cell, progress: Progress) -> Result:
    """seg/camvid: train on the 367 training images of CamVid, evaluate on its 233 test images.

    Returns:
        Metrics ``mIoU`` over 11 classes and ``aAcc`` in %; the series ``loss``.
    """
    config = configuration(CONFIGS / "segmenter_laptop_camvid-120x160.py", cell, cell.data)
    config.test_dataloader.batch_size = 16
    if cell.smoke:
        config.test_dataloader.dataset.indices = SMOKE_IMAGES
    schedule(config, cell)
    return train_and_evaluate(config, cell, progress, share=0.9)


def run_ade20k(cell: Cell, progress: Progress) -> Result:
    """Train with the paper's schedule, evaluate on the validation images; seg/ade20k-c corrupts them too.

    Returns:
        Metrics ``mIoU`` and ``aAcc`` in %, of seg/ade20k-c also ``mIoU corrupted`` and ``mIoU corrupted/<name>``; the
        series ``loss``.
    """
    options, corrupted = cell.options, cell.suite == "seg/ade20k-c"
    config = configuration(CONFIGS / f"segmenter_{cell.task}_mask_1xb8-160k_ade20k-512x512.py", cell, cell.data)
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.num_workers = options["workers"]
        loader.persistent_workers = options["workers"] > 0
    config.model.pretrained = options["pretrained"]
    if cell.smoke:
        config.train_dataloader.batch_size = 1
        config.test_dataloader.dataset.indices = config.val_dataloader.dataset.indices = SMOKE_IMAGES
    config.param_scheduler[0].end = config.train_cfg.max_iters
    share = 0.5 if corrupted else 0.9
    return train_and_evaluate(config, cell, progress, share=share, with_corruptions=corrupted)


def schedule(config: Config, cell: Cell) -> None:
    """Write the learning rate of a cell into a config, with a warm-up."""
    iterations = config.train_cfg.max_iters
    config.optim_wrapper.optimizer.lr = cell.options["lr"]
    config.param_scheduler[0].end = config.param_scheduler[1].begin = min(100, max(1, iterations // 10))
    config.param_scheduler[1].end = iterations


def train_and_evaluate(
    config: Config, cell: Cell, progress: Progress, *, share: float, with_corruptions: bool = False
) -> Result:
    """Train, which is a `share` of the cell's progress, and evaluate with mmengine's test loop and mmseg's metric.

    The validation images are clean and, if `with_corruptions`, also corrupted.
    """
    if with_corruptions:
        Corrupt(CORRUPTIONS[0], 1)  # raises before the training if its package is missing
    runner = train(config, cell, lambda done, text: progress(share * done, text))
    names = (SMOKE_CORRUPTIONS if cell.smoke else CORRUPTIONS) if with_corruptions else ()
    total = 1 + sum(len(severities(name)) for name in names)
    done = 0

    def test(pipeline: list[dict[str, Any]]) -> dict[str, float]:
        nonlocal done
        loader = runner.cfg.test_dataloader.copy()
        loader.dataset = {**loader.dataset, "pipeline": pipeline}
        found = TestLoop(runner, loader, runner.cfg.test_evaluator).run()
        done += 1
        progress(share + (1 - share) * done / total, f"mIoU {found['mIoU']:.2f}")
        return {key: float(value) for key, value in found.items()}

    pipeline = runner.cfg.test_dataloader.dataset.pipeline
    clean = test(pipeline)
    metrics = {"mIoU": clean["mIoU"], "aAcc": clean["aAcc"]}
    by_severity = {
        name: [test(distort(pipeline, name, severity))["mIoU"] for severity in severities(name)] for name in names
    }
    if by_severity:
        means = {name: statistics.fmean(values) for name, values in by_severity.items()}
        metrics["mIoU corrupted"] = statistics.fmean(means.values())
        metrics.update({f"mIoU corrupted/{name}": value for name, value in means.items()})
    return Result(
        metrics=metrics,
        series={"loss": losses(runner)},
        details={**about(runner.model), "mIoU by severity": by_severity},
    )
