"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))

SUITES: dict[str, dict[str, Any]] = {
    "ts/uea": {
        "summary": "UEA multivariate time-series classification with a 3-layer Transformer",
        "tasks": ["JapaneseVowels", "BasicMotions"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "paper": _PAPER["ts/uea"],
        "tasks_from_data": "quest_suites.tsai.data:tasks",
        "data": "a folder with NAME_TRAIN.ts and NAME_TEST.ts (or .parquet); without one, two datasets of aeon",
        "options": [
            {
                "name": "select",
                "kind": "str",
                "default": "validation",
                "doc": "the reported epoch: best on a validation split, last, or the paper's best on the test split "
                "(optimistic)",
                "choices": ["validation", "last", "paper"],
            },
            {"name": "epochs", "kind": "int", "default": 100, "doc": "most epochs of a run", "minimum": 1},
            {
                "name": "patience",
                "kind": "int",
                "default": 10,
                "doc": "epochs without a better accuracy before the run stops",
                "minimum": 1,
            },
            {
                "name": "lr",
                "kind": "float",
                "default": 0.001,
                "doc": "constant learning rate of RAdam",
                "minimum": 0,
            },
            {"name": "batch_size", "kind": "int", "default": 16, "doc": "series a training step", "minimum": 1},
            {"name": "d_model", "kind": "int", "default": 128, "doc": "features of a token", "minimum": 1},
            {"name": "layers", "kind": "int", "default": 3, "doc": "encoder layers", "minimum": 1},
            {
                "name": "heads",
                "kind": "int",
                "default": 8,
                "doc": "attention heads; they divide d_model",
                "minimum": 1,
            },
            {"name": "dropout", "kind": "float", "default": 0.1, "doc": "dropout of the encoder", "minimum": 0},
            {
                "name": "architecture",
                "kind": "str",
                "default": "paper",
                "doc": "the Transformer of the paper's protocol, or tsai's own TSTPlus",
                "choices": ["paper", "TSTPlus"],
            },
        ],
    },
    "time/tsai": {
        "summary": "an epoch of TSTPlus in tsai's own learner against tsai's own attention, in turns",
        "tasks": ["residual-scores", "plain"],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "memory of stock"}],
        "options": [
            {"name": "length", "kind": "int", "default": 29, "doc": "time steps", "minimum": 3},
            {"name": "series", "kind": "int", "default": 302, "doc": "series, 32 of them held out", "minimum": 64},
            {"name": "padded", "kind": "bool", "default": False, "doc": "every other series ends in NaN"},
            {"name": "rounds", "kind": "int", "default": 9, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
