"""What this plugin brings, as plain data. Standard library only: `quest list` and `quest bench ls` read it alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _toy_options() -> list[dict[str, Any]]:
    """The toy's options from the file beside this one; this module runs alone, without its package."""
    spec = importlib.util.spec_from_file_location("_quest_toy_options", Path(__file__).with_name("toy_options.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options: list[dict[str, Any]] = module.OPTIONS
    return options


def _whole(name: str, default: int, doc: str, minimum: int = 1) -> dict[str, Any]:
    return {"name": name, "kind": "int", "default": default, "minimum": minimum, "doc": doc}


IMAGE_OPTIONS = [
    _whole("train", 8000, "training images, drawn anew for each seed"),
    _whole("validation", 2000, "further training images, which choose the epoch that is reported"),
    _whole("epochs", 5, "passes over the training images"),
    _whole("batch", 128, "images in a mini-batch"),
    _whole("patch", 7, "pixels a side of a patch; it divides 28"),
    _whole("width", 64, "features of a token"),
    _whole("layers", 4, "Transformer blocks"),
    _whole("heads", 4, "attention heads of a block"),
    _whole("warmup", 0, "steps in which the learning rate rises to its value", 0),
    {"name": "weight_decay", "kind": "float", "default": 0.05, "minimum": 0.0, "doc": "of AdamW, on every parameter"},
]

INFO: dict[str, Any] = {
    "name": "bench",
    "api": (1, 0),
    "summary": "benchmark orchestrator (`quest bench`) and the spurious-correlation toy",
    "suites": [
        {
            "suite": "toy/spurious",
            "summary": "key-value retrieval with a spurious shortcut: how often training finds the true rule",
            "tasks": ["retrieval"],
            "metric": "success_rate",
            "unit": "%",
            "higher_is_better": True,
            "paper": {"retrieval": {"standard": 25.0, "qnorm": 49.0, "quest": 58.0}},
            "paper_source": "QUEST (arXiv 2604.00199), figure 3 / section 2.2",
            "options": _toy_options(),
            "plots": "quest_bench.toy_plots:plots",
            "needs": None,
        },
        {
            "suite": "images/fashion-mnist",
            "summary": "a small Vision Transformer on Fashion-MNIST, one task for each learning rate",
            "tasks": ["lr=0.001", "lr=0.003", "lr=0.01", "lr=0.03"],
            "metric": "accuracy",
            "unit": "%",
            "higher_is_better": True,
            "options": IMAGE_OPTIONS,
            "needs": None,
        },
    ],
}
