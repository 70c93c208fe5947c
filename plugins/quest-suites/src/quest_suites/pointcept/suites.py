"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import number, papers, text, timing_suite, whole

SUITES: dict[str, dict[str, Any]] = {
    "points/scenes": {
        "summary": "segmentation of generated lidar-like scenes with nuScenes' 16 classes by a small "
        "Point Transformer V3 (torch-pointcloud)",
        "tasks": ["street"],
        "metric": "miou",
        "selection": "last",
        "unit": "%",
        "options": [
            whole("epochs", 12, "passes over the scenes"),
            number("lr", 0.004, "peak learning rate of AdamW"),
            whole("batch_size", 4, "scenes a training step"),
            whole("train_scenes", 48, "scenes to train on"),
            whole("val_scenes", 24, "scenes to evaluate on"),
            whole("patch_size", 256, "points of a patch", 2),
            number("grid_size", 0.4, "edge of a voxel in meters", 0.01),
        ],
    },
    "pointcept": {
        "summary": "Pointcept's own tools/train.py in a checkout of Pointcept, with any of its configs that has a "
        "Point Transformer V3",
        "tasks": [],
        "metric": "mIoU",  # or the one that a config's evaluator names
        "selection": "last",
        "unit": "%",
        "paper": papers(__file__)["pointcept"],
        "data": "a checkout of Pointcept; a task is a config in it, such as configs/nuscenes/semseg-pt-v3m1-0-base.py",
        "data_required": True,
        "tasks_from_data": "quest_suites.pointcept.own:tasks",
        "options": [
            whole("gpus", 1, "GPUs to train on"),
            text("set", "further key=value for tools/train.py --options, such as 'epoch=2 eval_epoch=2'"),
        ],
    },
    "time/pointcept": timing_suite(
        "a training step of a small Point Transformer V3 against torch-pointcloud's own, in turns",
        ["scenes"],
        10,
    ),
}
