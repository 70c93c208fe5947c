"""points/scenes: torch-pointcloud's Point Transformer V3 on generated scenes (see `scenes`).

torch-pointcloud has a module for Lightning and no trainer, so the loop is here. It follows Pointcept's nuScenes
configuration: AdamW with weight decay 0.005 under a one-cycle schedule, cross-entropy plus Lovász loss, random turns,
flips and scales, one point of each voxel. Model and scenes are small, so a cell takes minutes on a CPU; blocks have the
same learning rate as the rest. Scenes are the same for all cells; the seed sets weights, order and augmentation.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quest_pointcept.on_cpu import train_on_cpu
from quest_suites.contract import Cell, Progress, Result, about, load_state, save_state

from . import scenes

RINGS, RAYS = 24, 180
SMOKE_SCENES, SMOKE_EPOCHS = 4, 2
SIZES: dict[str, Any] = {
    "strides": (2, 2),
    "encoder_depths": (2, 2, 2),
    "encoder_channels": (32, 64, 96),
    "encoder_num_heads": (2, 4, 6),
    "decoder_depths": (1, 1),
    "decoder_channels": (64, 32),
    "decoder_num_heads": (4, 2),
    "drop_path": 0.1,
}


class Batch(NamedTuple):
    """Concatenated scenes: features [N, 4], voxels [N, 3], scene [N] and labels [N] of the points."""

    x: Tensor
    grid: Tensor
    scene: Tensor
    label: Tensor


def run_scenes(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate a small Point Transformer V3 on generated scenes.

    Returns:
        Metrics ``miou`` (mean intersection over union of the classes, in %) and ``accuracy`` (% of points); series
        ``train_loss`` by epoch; the IoU of every class in the details.
    """
    from torch_pointcloud.losses.lovasz import LovaszLoss

    options = cell.options
    epochs = min(options["epochs"], SMOKE_EPOCHS) if cell.smoke else options["epochs"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_on_cpu()

    data: dict[str, list[scenes.Scan]] = {}
    for split in ("train", "val"):
        count = min(options[f"{split}_scenes"], SMOKE_SCENES) if cell.smoke else options[f"{split}_scenes"]
        data[split] = [scenes.scan(seed, rings=RINGS, rays=RAYS) for seed in scenes.seeds(split, count)]
        progress(0.0, f"{count} scenes to {split}")

    torch.manual_seed(cell.seed)
    model = build(options["patch_size"], attention=cell.attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["lr"], weight_decay=0.005)
    steps = math.ceil(len(data["train"]) / options["batch_size"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        options["lr"],
        epochs=epochs,
        steps_per_epoch=steps,
        pct_start=0.1,
        div_factor=10,
        final_div_factor=100,
    )
    cross_entropy, lovasz = nn.CrossEntropyLoss(), LovaszLoss()
    random = np.random.default_rng(cell.seed)
    losses: list[float] = []
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if state := load_state(cell):
        losses, random.bit_generator.state = state["losses"], state["random"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(len(losses), epochs):
        model.train()
        total = torch.zeros((), device=device)
        for batch in batches(data["train"], options, random, device):
            logits = model(batch.x, batch.grid, batch.scene)
            loss = cross_entropy(logits, batch.label) + lovasz(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        losses.append(total.item() / steps)
        kept = {name: part.state_dict() for name, part in parts.items()}
        save_state(cell, {"losses": losses, "random": random.bit_generator.state, **kept})
        progress((epoch + 1) / epochs, f"epoch {epoch + 1} loss {losses[-1]:.3f}")

    model.eval()
    confusion = torch.zeros(len(scenes.CLASSES), len(scenes.CLASSES), dtype=torch.long, device=device)  # truth × guess
    with torch.no_grad():
        for batch in batches(data["val"], options, None, device):
            guess = model(batch.x, batch.grid, batch.scene).argmax(1)
            pairs = batch.label * len(scenes.CLASSES) + guess
            confusion += pairs.bincount(minlength=confusion.numel()).view_as(confusion)
    iou = intersection_over_union(confusion)
    return Result(
        metrics={
            "miou": 100 * float(np.nanmean(list(iou.values()))),
            "accuracy": 100 * (confusion.diagonal().sum() / confusion.sum()).item(),
        },
        series={"train_loss": losses},
        details={
            "iou": {name: 100 * value for name, value in iou.items()},
            **about(model),
            "points_per_scene": sum(len(one.labels) for one in data["val"]) / len(data["val"]),
            "voxels_per_scene": int(confusion.sum()) / len(data["val"]),
        },
    )


def build(patch_size: int, **how: Any) -> Any:
    """Return torch-pointcloud's model in SIZES, with stock's attention if `attention` is not given."""
    from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

    return PointTransformerV3Segmentation(
        in_channels=4,
        num_classes=len(scenes.CLASSES),
        encoder_patch_size=(patch_size,) * len(SIZES["encoder_depths"]),
        decoder_patch_size=(patch_size,) * len(SIZES["decoder_depths"]),
        **SIZES,
        **how,
    )


def intersection_over_union(confusion: Tensor) -> dict[str, float]:
    """Return each class's IoU from a confusion matrix (truth × guess); NaN for a class absent from both."""
    hit = confusion.diagonal().double()
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return dict(zip(scenes.CLASSES, (hit / union).tolist(), strict=True))


def batches(
    scans: list[scenes.Scan], options: Any, random: np.random.Generator | None, device: torch.device
) -> Iterator[Batch]:
    """Yield every scan once: in random order and augmented, or unchanged if `random` is None."""
    order = np.arange(len(scans)) if random is None else random.permutation(len(scans))
    for first in range(0, len(scans), options["batch_size"]):
        parts = [voxels(scans[i], options["grid_size"], random) for i in order[first : first + options["batch_size"]]]
        scene = np.repeat(np.arange(len(parts)), [len(label) for _, _, label in parts])
        x, grid, label = (np.concatenate(column) for column in zip(*parts, strict=True))
        yield Batch(*(torch.from_numpy(array).to(device) for array in (x, grid, scene, label)))


def voxels(
    scan: scenes.Scan, size: float, random: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return one point of each voxel: position and strength [N, 4], voxel [N, 3], label [N]; augmented by `random`."""
    points = scan.points
    order = np.arange(len(points))
    if random is not None:
        angle = random.uniform(-math.pi, math.pi)
        turn = np.array([[math.cos(angle), math.sin(angle), 0], [-math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
        turn *= random.uniform(0.9, 1.1)
        turn[:, 1] *= random.choice([-1.0, 1.0])
        points = (points @ turn).astype(np.float32)
        order = random.permutation(len(points))
    grid = np.floor((points - points.min(0)) / size).astype(np.int64)
    _, first = np.unique(grid[order], axis=0, return_index=True)
    kept = order[first]
    x = np.concatenate([points[kept], scan.strength[kept, None]], axis=1)
    return x, grid[kept], scan.labels[kept]
