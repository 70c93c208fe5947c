"""The suites of this plugin as data."""

from __future__ import annotations

from typing import Any

from quest_suites.declaring import number, whole

SUITES: dict[str, dict[str, Any]] = {
    "det/objects": {
        "summary": "a small Deformable DETR on generated images in the layout of COCO",
        "tasks": ["objects"],
        "metric": "mAP",
        "selection": "last",
        "also": [{"metric": "mAP50"}],
        "unit": "%",
        "options": [
            whole("iterations", 1000, "training iterations"),
            whole("batch_size", 16, "images an iteration"),
            number("lr", 0.001, "largest learning rate of AdamW"),
            whole("train_images", 512, "images to train on"),
            whole("validation_images", 64, "images to test on"),
        ],
    },
}
