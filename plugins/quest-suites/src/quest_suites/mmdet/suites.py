"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import choice, number, timing_suite, whole

SUITES: dict[str, dict[str, Any]] = {
    "det/objects": {
        "summary": "a small Deformable DETR on generated images in the layout of COCO",
        "tasks": ["objects"],
        "metric": "mAP",
        "selection": "last",
        "also": [{"metric": "mAP50"}, {"metric": "largest logit", "unit": "", "higher_is_better": False}],
        "unit": "%",
        "options": [
            whole("iterations", 1000, "training iterations"),
            whole("batch_size", 16, "images an iteration"),
            number("lr", 0.001, "largest learning rate of AdamW"),
            choice("precision", ("float32", "bfloat16"), "of autocast in training"),
            whole("train_images", 512, "images to train on"),
            whole("validation_images", 64, "images to test on"),
        ],
    },
    "time/mmdet": timing_suite(
        "a training step of a small Deformable DETR against stock mmdetection, in turns",
        ["deformable-detr"],
        10,
    ),
}
