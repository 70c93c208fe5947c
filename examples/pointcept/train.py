"""QUEST attention in torch-pointcloud's Point Transformer V3, on generated lidar-like scenes of streets.

python examples/pointcept/train.py --attention quest --epochs 4
python examples/pointcept/train.py --attention "quest(init=12)"  # queries start at norm 12; null is the paper's
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

from quest_pointcept import train_on_cpu  # from here on torch-pointcloud's models accept attention=
from quest_suites.pointcept.scenes import CLASSES, scan, seeds


def scene(seed: int, size: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Features [N, 4], voxels [N, 3], cloud [N] and labels [N]: one point of each voxel of `size` metres."""
    seen = scan(seed, rings=24, rays=180)
    grid = np.floor((seen.points - seen.points.min(0)) / size).astype(np.int64)
    grid, first = np.unique(grid, axis=0, return_index=True)
    x = np.concatenate([seen.points, seen.strength[:, None]], axis=1)[first]
    arrays = (x, grid, np.zeros(len(first), np.int64), seen.labels[first])
    return tuple(torch.from_numpy(array) for array in arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="quest", help="a name: standard, quest, 'quest+gqa(kv_heads=2)'")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train_on_cpu()  # mends the CPU build of spconv
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    model = PointTransformerV3Segmentation(
        in_channels=4,
        num_classes=len(CLASSES),
        strides=(2, 2),
        encoder_depths=(2, 2, 2),
        encoder_channels=(16, 32, 64),
        encoder_num_heads=(2, 4, 8),
        encoder_patch_size=(256, 256, 256),
        decoder_depths=(1, 1),
        decoder_channels=(32, 16),
        decoder_num_heads=(4, 2),
        decoder_patch_size=(256, 256),
        attention=options.attention,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.005)
    train = [scene(seed) for seed in seeds("train", 24)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=options.epochs * len(train))
    for epoch in range(options.epochs):
        model.train()
        total = 0.0
        for i in torch.randperm(len(train)).tolist():
            x, grid, batch, label = (part.to(device) for part in train[i])
            loss = torch.nn.functional.cross_entropy(model(x, grid, batch), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(train):.3f}", flush=True)
    model.eval()
    right = points = 0
    with torch.no_grad():
        for seed in seeds("val", 8):
            x, grid, batch, label = (part.to(device) for part in scene(seed))
            right += (model(x, grid, batch).argmax(1) == label).sum().item()
            points += len(label)
    print(f"{options.attention}: {100 * right / points:.2f} % of the points of 8 other scenes")


if __name__ == "__main__":
    main()
