"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

from typing import Any

SUITES: dict[str, dict[str, Any]] = {
    "vision/strokes": {
        "summary": "a 4-layer ViT classifies the direction of most strokes of a generated image; synthetic data",
        "tasks": ["strokes"],
        "heads": 4,
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "options": [
            {"name": "steps", "kind": "int", "default": 600, "doc": "training steps of 64 images", "minimum": 1},
            {"name": "strokes", "kind": "int", "default": 7, "doc": "strokes an image", "minimum": 1},
            {"name": "lr", "kind": "float", "default": 0.001, "doc": "learning rate of AdamW", "minimum": 0},
        ],
    },
    "time/timm": {
        "summary": "a training step of models of timm, torchvision and plain PyTorch against their own attention",
        "tasks": [
            "vit",
            "deit3",
            "eva02",
            "beit",
            "swin",
            "crossvit",
            "torchvision",
            "vit-universal",
            "decoder-universal",
            "encoder-universal",
        ],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "least time of stock"}, {"metric": "memory of stock"}],
        "options": [
            {"name": "batch", "kind": "int", "default": 2, "doc": "images or sequences a step", "minimum": 1},
            {"name": "rounds", "kind": "int", "default": 12, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
