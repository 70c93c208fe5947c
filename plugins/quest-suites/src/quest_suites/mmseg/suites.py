"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _option(name: str, kind: str, default: Any, doc: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "default": default, "doc": doc, **limits}


_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))

_ADE20K: dict[str, Any] = {
    "tasks": ["vit-t", "vit-s"],
    "unit": "%",
    "higher_is_better": True,
    "data": "the folder ADEChallengeData2016 of ADE20K, with images/ and annotations/",
    "data_files": ["annotations/validation"],
    "data_required": True,
    "options": [
        _option("iterations", "int", 160000, "training iterations", minimum=1),
        _option("batch_size", "int", 8, "images an iteration", minimum=1),
        _option("workers", "int", 4, "processes that load images", minimum=0),
        _option("pretrained", "str", None, "ViT weights under mmseg's names (vit2mmseg.py); null: none", nullable=True),
        _option("checkpoint", "str", None, "a trained Segmenter to evaluate; null: train one", nullable=True),
    ],
}

SUITES: dict[str, dict[str, Any]] = {
    "seg/shapes": {
        "summary": "a small Segmenter on generated scenes in the layout of ADE20K, clean and under 16 corruptions",
        "tasks": ["scenes"],
        "metric": "mIoU",
        "selection": "last",
        "also": [{"metric": "mIoU corrupted"}],
        "unit": "%",
        "higher_is_better": True,
        "options": [
            _option("iterations", "int", 1000, "training iterations", minimum=1),
            _option("batch_size", "int", 16, "images an iteration", minimum=1),
            _option("lr", "float", 0.001, "largest learning rate of AdamW", minimum=0),
            _option("train_images", "int", 512, "scenes to train on", minimum=1),
            _option("validation_images", "int", 64, "scenes to test on", minimum=1),
        ],
    },
    "seg/ade20k": {
        **_ADE20K,
        "summary": "Segmenter on ADE20K with the paper's schedule",
        "metric": "mIoU",
        "selection": "last",
        "paper": _PAPER["seg/ade20k"],
    },
    "seg/ade20k-c": {
        **_ADE20K,
        "summary": "Segmenter on ADE20K with the paper's schedule, under 16 corruptions",
        "metric": "mIoU corrupted",
        "selection": "last",
        "paper": _PAPER["seg/ade20k-c"],
    },
    "time/mmseg": {
        "summary": "a training step of Segmenter against stock mmsegmentation, in turns",
        "tasks": ["vit-t", "vit-s"],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "memory of stock"}],
        "options": [
            {"name": "size", "kind": "int", "default": 512, "doc": "height and width of the images", "minimum": 32},
            {"name": "batch", "kind": "int", "default": 1, "doc": "images a step", "minimum": 1},
            {"name": "rounds", "kind": "int", "default": 5, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
