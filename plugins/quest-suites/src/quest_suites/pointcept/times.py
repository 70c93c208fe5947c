"""time/pointcept: a training step of a small Point Transformer V3 (forward, loss, backward, AdamW), against stock.

Stock is torch-pointcloud's model with its own attention. Model and scenes are those of points/scenes.
"""

import torch
import torch.nn.functional as F

from quest_pointcept.on_cpu import train_on_cpu
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

from . import scenes
from .tasks import RAYS, RINGS, batches, build


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`."""
    count = 1 if cell.smoke else 4
    train_on_cpu()
    scans = [scenes.scan(seed, rings=RINGS, rays=RAYS) for seed in scenes.seeds("train", count)]
    batch = next(batches(scans, {"grid_size": 0.4, "batch_size": count}, None, torch.device(DEVICE)))

    def make(attention: str | None) -> Step:
        how = {"attention": attention} if attention else {"use_flash_attn": DEVICE == "cuda"}
        model = build(256, **how).to(DEVICE).train()  # points of a patch
        return training_step(
            model,
            lambda: F.cross_entropy(model(batch.x, batch.grid, batch.scene), batch.label),
            torch.optim.AdamW(model.parameters(), lr=0.001),
        )

    return against_stock(cell, progress, make)
