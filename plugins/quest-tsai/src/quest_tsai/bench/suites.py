"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

from typing import Any

# Accuracy in %, one row a dataset: standard, quest, qnorm, qknorm (arXiv 2604.00199, tables 7 and A8).
_PAPER = {
    "EthanolConcentration": (29.28, 30.42, 29.28, 29.28),
    "FaceDetection": (65.24, 65.83, 64.81, 64.73),
    "Handwriting": (42.00, 49.18, 41.06, 49.18),
    "Heartbeat": (77.56, 78.54, 75.61, 77.56),
    "JapaneseVowels": (98.38, 98.38, 98.92, 98.38),
    "PEMS-SF": (83.82, 80.92, 80.92, 79.19),
    "SelfRegulationSCP1": (88.05, 88.05, 87.71, 88.76),
    "SelfRegulationSCP2": (58.89, 58.33, 56.67, 54.44),
    "SpokenArabicDigits": (98.86, 99.41, 99.41, 99.45),
    "UWaveGestureLibrary": (86.88, 86.25, 85.00, 86.81),
}

SUITES: dict[str, dict[str, Any]] = {
    "ts/uea": {
        "summary": "UEA multivariate time-series classification with a 3-layer Transformer",
        "tasks": ["JapaneseVowels", "BasicMotions"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "paper": {
            task: dict(zip(("standard", "quest", "qnorm", "qknorm"), row, strict=True)) for task, row in _PAPER.items()
        },
        "paper_source": "QUEST (arXiv 2604.00199), table 7 and A8",
        "paper_protocol": "the best epoch on the test split, which training stops on too (select=paper)",
        "preload": ["tsai.tslearner", "tsai.data.core"],
        "tasks_from_data": "quest_tsai.bench.data:tasks",
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
    }
}
