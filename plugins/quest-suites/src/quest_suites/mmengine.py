"""Cells that mmengine's own Runner trains, and steps of its models: of quest_suites.mmseg and quest_suites.mmdet."""

import copy
import logging
import math
import statistics
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

SMOKE_ITERATIONS, SMOKE_IMAGES = 4, 8


def generated(write: Callable[..., None], cell: Cell) -> Path:
    """Return a folder with the images of a cell by `write`; they are the same for every attention and seed."""
    folder = cell.workdir / "scenes"
    counts = {name: cell.options[f"{name}_images"] for name in ("train", "validation")}
    write(folder, **(dict.fromkeys(counts, SMOKE_IMAGES) if cell.smoke else counts))
    return folder


def configuration(path: Path, cell: Cell, data: Path | None) -> Config:
    """Return a config that reads from a folder, with the attention, seed, iterations and batch size of a cell.

    It is that of a model that accepts `attention`, with an IterBasedTrainLoop.
    """
    config, count = Config.fromfile(path), cell.options["iterations"]
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        loader.dataset.data_root = str(data)
    config.train_dataloader.batch_size = cell.options["batch_size"]
    config.train_cfg.max_iters = min(SMOKE_ITERATIONS, count) if cell.smoke else count
    config.model.attention = cell.attention
    config.randomness = {"seed": cell.seed}
    return config


def train(config: Config, cell: Cell, progress: Progress) -> Runner:
    """Train with mmengine's Runner and return it, with its model in evaluation mode.

    The Runner continues from the last checkpoint in the cell's workdir.
    """
    iterations = config.train_cfg.max_iters
    config.train_cfg.val_interval = iterations + 1  # suites evaluate once, at the end
    config.default_hooks.checkpoint = {
        "type": "CheckpointHook", "by_epoch": False, "interval": max(1, iterations // 10), "max_keep_ckpts": 1
    }  # fmt: skip
    config.work_dir = str(cell.workdir)
    config.resume = True
    config.experiment_name = f"{cell.workdir.name}-{uuid.uuid4().hex}"  # mmengine requires a unique name per runner
    config.visualizer.name = config.experiment_name
    config.log_level = "WARNING"
    if not torch.cuda.is_available():
        config.env_cfg.dist_cfg.backend = "gloo"
    runner = Runner.from_cfg(config)
    runner.register_hook(_Watch(iterations, progress))
    runner.train()
    runner.model.eval()
    return runner


class _Watch(Hook):
    """Reports progress. mmengine's message hub keeps the losses, also those of a resumed run."""

    def __init__(self, iterations: int, progress: Progress) -> None:
        self.iterations, self.progress = iterations, progress

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        loss = float((outputs or {})["loss"].detach())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of iteration {runner.iter + 1} is {loss}")
        done = runner.iter + 1
        self.progress(done / self.iterations, f"iteration {done} loss {loss:.3f}")


def losses(runner: Runner) -> list[float]:
    """Return the training loss as about 200 means over equal stretches."""
    history: Any = runner.message_hub.get_scalar("train/loss")
    values = [float(value) for value in history.data[0]]
    step = max(1, len(values) // 200)
    return [statistics.fmean(values[i : i + step]) for i in range(0, len(values), step)]


def time_training(
    cell: Cell, progress: Progress, config: ConfigDict, stock: str, loss: Callable[[Any], Tensor]
) -> Result:
    """Time a training step (forward, `loss` of the model, backward, SGD) against that of the model type `stock`."""
    logging.getLogger("mmengine").setLevel(logging.ERROR)

    def make(attention: str | None) -> Step:
        own = copy.deepcopy(config)
        own.attention = attention
        if attention is None:
            own.type = stock
            del own.attention
        model = MODELS.build(own)
        model.init_weights()
        model.to(DEVICE).train()
        return training_step(model, lambda: loss(model), torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))

    return against_stock(cell, progress, make)
