"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))

SUITES: dict[str, dict[str, Any]] = {
    "points/scenes": {
        "summary": "segmentation of generated lidar-like scenes with nuScenes' 16 classes by a small "
        "Point Transformer V3 (torch-pointcloud)",
        "tasks": ["street"],
        "metric": "miou",
        "selection": "last",
        "unit": "%",
        "higher_is_better": True,
        "options": [
            {"name": "epochs", "kind": "int", "default": 12, "doc": "passes over the scenes", "minimum": 1},
            {"name": "lr", "kind": "float", "default": 0.004, "doc": "peak learning rate of AdamW", "minimum": 0},
            {"name": "batch_size", "kind": "int", "default": 4, "doc": "scenes a training step", "minimum": 1},
            {"name": "train_scenes", "kind": "int", "default": 48, "doc": "scenes to train on", "minimum": 1},
            {"name": "val_scenes", "kind": "int", "default": 24, "doc": "scenes to evaluate on", "minimum": 1},
            {"name": "patch_size", "kind": "int", "default": 256, "doc": "points of a patch", "minimum": 2},
            {
                "name": "grid_size",
                "kind": "float",
                "default": 0.4,
                "doc": "edge of a voxel in metres",
                "minimum": 0.01,
            },
        ],
    },
    "pointcept": {
        "summary": "Pointcept's own tools/train.py in a checkout of Pointcept, with any of its configs that has a "
        "Point Transformer V3",
        "tasks": [],
        "metric": "mIoU",  # or the one that a config's evaluator names
        "selection": "last",
        "unit": "%",
        "higher_is_better": True,
        "paper": _PAPER["pointcept"],
        "data": "a checkout of Pointcept; a task is a config in it, such as configs/nuscenes/semseg-pt-v3m1-0-base.py",
        "data_required": True,
        "tasks_from_data": "quest_suites.pointcept.own:tasks",
        "options": [
            {"name": "gpus", "kind": "int", "default": 1, "doc": "GPUs to train on", "minimum": 1},
            {
                "name": "set",
                "kind": "str",
                "default": "",
                "doc": "further key=value for tools/train.py --options, such as 'epoch=2 eval_epoch=2'",
            },
        ],
    },
    "time/pointcept": {
        "summary": "a training step of a small Point Transformer V3 against torch-pointcloud's own, in turns",
        "tasks": ["scenes"],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "memory of stock"}],
        "options": [
            {"name": "batch_size", "kind": "int", "default": 4, "doc": "scenes a step", "minimum": 1},
            {"name": "patch_size", "kind": "int", "default": 256, "doc": "points of a patch", "minimum": 2},
            {"name": "rounds", "kind": "int", "default": 10, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
