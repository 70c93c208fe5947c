"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_GENERATED = (
    "graphs drawn from the published generator, not the published files; "
    "the best epoch is chosen on the validation split"
)
_FROM_DATA = "the best epoch is chosen on the validation split"


def _options(
    graphs: str, sizes: int, layers: int, batch: int, lr: float, epochs: int, warmup: int
) -> list[dict[str, Any]]:
    """Return the options that every suite has, with the paper's defaults."""
    return [
        {"name": "graphs", "kind": "int", "default": sizes, "doc": graphs, "minimum": 0},
        {"name": "epochs", "kind": "int", "default": epochs, "doc": "epochs of training", "minimum": 1},
        {"name": "batch_size", "kind": "int", "default": batch, "doc": "graphs a training step", "minimum": 1},
        {"name": "lr", "kind": "float", "default": lr, "doc": "highest learning rate of AdamW", "minimum": 0},
        {
            "name": "warmup_epochs",
            "kind": "int",
            "default": warmup,
            "doc": "epochs in which the rate rises; with any, the first has almost none, as in GraphGPS",
            "minimum": 0,
        },
        {
            "name": "attn_dropout",
            "kind": "float",
            "default": 0.5,
            "doc": "dropout of attention weights; 0 for linear, cosine and aft-simple, which have none",
            "minimum": 0,
        },
        {"name": "layers", "kind": "int", "default": layers, "doc": "GPS layers", "minimum": 1},
    ]


_SEED = {"name": "data_seed", "kind": "int", "default": 0, "doc": "seed of the generated graphs", "minimum": 0}
_SBM = "training graphs; PATTERN has a fifth as many of validation and of test, CLUSTER a tenth"
_ALL = "training graphs to use, with a tenth as many of validation and of test; 0 for all"
_SBM_DATA = "a folder with GNNBenchmarkDataset/ of PyTorch Geometric; without one, the graphs are generated"
_PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))

SUITES: dict[str, dict[str, Any]] = {
    "graph/pattern": {
        "summary": f"which nodes of a graph belong to a hidden pattern, GPS; {_GENERATED}",
        "tasks": ["PATTERN"],
        "metric": "accuracy",
        "selection": "validation",
        "unit": "%",
        "paper": _PAPER["graph/pattern"],
        "data": _SBM_DATA,
        "data_files": ["GNNBenchmarkDataset/PATTERN/raw"],
        "options": [*_options(_SBM, 10000, 6, 32, 0.0005, 100, 5), _SEED],
    },
    "graph/cluster": {
        "summary": f"which of six communities a node belongs to, GPS; {_GENERATED}",
        "tasks": ["CLUSTER"],
        "metric": "accuracy",
        "selection": "validation",
        "unit": "%",
        "paper": _PAPER["graph/cluster"],
        "data": _SBM_DATA,
        "data_files": ["GNNBenchmarkDataset/CLUSTER/raw"],
        "options": [*_options(_SBM, 10000, 16, 16, 0.0005, 100, 5), _SEED],
    },
    "graph/zinc": {
        "summary": f"constrained solubility of molecules, GPS; {_FROM_DATA}",
        "tasks": ["ZINC"],
        "metric": "mae",
        "selection": "validation",
        "higher_is_better": False,
        "paper": _PAPER["graph/zinc"],
        "data": "a folder with ZINC/, as PyTorch Geometric's ZINC lays it out",
        "data_files": ["ZINC/raw"],
        "data_required": True,
        "options": _options(_ALL, 0, 10, 32, 0.001, 2000, 50),
    },
    "graph/cifar10": {
        "summary": f"the class of an image from its superpixels, GPS; {_FROM_DATA}",
        "tasks": ["CIFAR10"],
        "metric": "accuracy",
        "selection": "validation",
        "unit": "%",
        "paper": _PAPER["graph/cifar10"],
        "data": "a folder with GNNBenchmarkDataset/, as PyTorch Geometric's GNNBenchmarkDataset lays it out",
        "data_files": ["GNNBenchmarkDataset/CIFAR10/raw"],
        "data_required": True,
        "options": _options(_ALL, 0, 3, 16, 0.001, 100, 5),
    },
    "stability/graph": {
        "summary": f"accuracy over learning rates up to divergence, GPS on PATTERN; {_GENERATED}",
        "tasks": ["PATTERN"],
        "metric": "accuracy",
        "selection": "validation",
        "unit": "%",
        "also": [
            {"metric": "best accuracy"},
            {"metric": "range", "unit": "decades"},
            {"metric": "diverged", "unit": "rates", "higher_is_better": False},
        ],
        "plots": "quest_research.suites.stability:plots",
        "data": _SBM_DATA,
        "data_files": ["GNNBenchmarkDataset/PATTERN/raw"],
        "options": [
            *(option for option in _options(_SBM, 300, 2, 8, 0.0, 8, 0) if option["name"] != "lr"),
            {"name": "rates", "kind": "int", "default": 4, "doc": "learning rates, half a decade apart", "minimum": 2},
            {"name": "lowest", "kind": "float", "default": 0.0001, "doc": "lowest learning rate", "minimum": 0},
            _SEED,
        ],
    },
    "graphgps": {
        "summary": "GraphGPS's own main.py in a checkout of GraphGPS, with any of its configs",
        "tasks": [],
        "metric": "metric_best",  # each config names its own
        "selection": "validation",
        "data": "a checkout of GraphGPS; a task is a config in it, such as configs/GPS/zinc-GPS+RWSE.yaml",
        "data_required": True,
        "tasks_from_data": "quest_suites.graphgps.own:tasks",
        "options": [
            {"name": "set", "kind": "str", "default": "", "doc": "further words for main.py, such as 'gt.dropout 0.1'"}
        ],
    },
    "time/graphgps": {
        "summary": "an attention layer, or a model of GPSConv, on 32 graphs against the host's own on padded batches",
        "tasks": [
            *("gps-zinc", "gps-pattern", "gps-peptides"),
            *("2000-among-50", "1000-among-50", "zinc", "pattern", "molecules-and-a-peptide", "peptides"),
            *(f"{nodes}-among-30" for nodes in (30, 40, 45, 50, 60, 80, 120, 200)),
        ],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "memory of stock"}],
        "options": [
            {
                "name": "packing",
                "kind": "str",
                "default": "auto",
                "doc": "whether ragged batches are packed",
                "choices": ["auto", "always", "never"],
            },
            {"name": "dropout", "kind": "float", "default": 0.0, "doc": "dropout of attention weights", "minimum": 0},
            {"name": "rounds", "kind": "int", "default": 15, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
