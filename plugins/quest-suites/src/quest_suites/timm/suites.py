"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import number, timing_suite, whole

SUITES: dict[str, dict[str, Any]] = {
    "vision/strokes": {
        "summary": "a 4-layer ViT classifies the direction of most strokes of a generated image; synthetic data",
        "tasks": ["strokes"],
        "heads": 4,
        "metric": "accuracy",
        "unit": "%",
        "selection": "last",
        "options": [
            whole("steps", 600, "training steps of 64 images"),
            number("lr", 0.001, "learning rate of AdamW"),
        ],
    },
    "time/timm": timing_suite(
        "a training step of models of timm, torchvision and plain PyTorch against their own attention",
        [
            *("vit", "deit3", "eva02", "beit", "swin", "crossvit", "torchvision"),
            *("vit-by-hand", "vit-universal", "decoder-universal", "encoder-universal"),
        ],
        12,
        least=True,
    ),
}
