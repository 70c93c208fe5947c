"""time/pointcept: a training step of a small Point Transformer V3 (forward, loss, backward, AdamW), against stock.

Stock is torch-pointcloud's model with its own attention. Model and scenes are those of points/scenes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from quest_pointcept.on_cpu import train_on_cpu
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import beside_stock

from . import scenes
from .tasks import RAYS, RINGS, Batch, batches, build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.beside_stock`."""
    options = {**cell.options, "grid_size": 0.4, **({"rounds": 2, "batch_size": 1} if cell.smoke else {})}
    train_on_cpu()
    scans = [scenes.scan(seed, rings=RINGS, rays=RAYS) for seed in scenes.seeds("train", options["batch_size"])]
    batch = next(batches(scans, options, None, DEVICE))
    steps = []
    for attention in ({"use_flash_attn": DEVICE.type == "cuda"}, {"attention": cell.attention}):
        torch.manual_seed(cell.seed)
        model = build(options["patch_size"], **attention).to(DEVICE).train()
        steps.append(partial(step, model, torch.optim.AdamW(model.parameters(), lr=0.001), batch))
    return beside_stock(*steps, rounds=options["rounds"], progress=progress)


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Train on one batch."""
    F.cross_entropy(model(batch.x, batch.grid, batch.scene), batch.label).backward()
    optimizer.step()
    optimizer.zero_grad()
