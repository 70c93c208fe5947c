"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

from typing import Any

SUITES: dict[str, dict[str, Any]] = {
    "vision/strokes": {
        "summary": "a 4-layer ViT tells which direction most strokes of a generated image have; synthetic data",
        "tasks": ["strokes"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "options": [
            {"name": "steps", "kind": "int", "default": 600, "doc": "training steps of 64 images", "minimum": 1},
            {"name": "strokes", "kind": "int", "default": 7, "doc": "strokes an image", "minimum": 1},
            {"name": "lr", "kind": "float", "default": 0.001, "doc": "learning rate of AdamW", "minimum": 0},
        ],
    },
}
