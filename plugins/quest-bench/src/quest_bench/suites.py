"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

from typing import Any

OPTIONS: list[dict[str, Any]] = [
    {
        "name": "samples",
        "kind": "int",
        "default": 2048,
        "minimum": 1,
        "doc": "training sequences; the paper does not say how many, and which attentions succeed depends on it",
    },
    {
        "name": "test_samples",
        "kind": "int",
        "default": 2048,
        "minimum": 1,
        "doc": "test sequences, none of them biased",
    },
    {
        "name": "seq_len",
        "kind": "int",
        "default": 20,
        "minimum": 11,
        "doc": "vectors in a sequence; answers lie around position 10 with standard deviation 2",
    },
    {"name": "epochs", "kind": "int", "default": 50, "minimum": 1, "doc": "passes over the training sequences"},
    {"name": "batch", "kind": "int", "default": 32, "minimum": 1, "doc": "sequences in a mini-batch"},
    {
        "name": "weight_seeds",
        "kind": "int",
        "default": 3,
        "minimum": 1,
        "doc": "weight initialisations for each learning rate and weight decay (the paper: 5)",
    },
    {
        "name": "block",
        "kind": "str",
        "default": "prenorm",
        "choices": ("prenorm", "printed"),
        "doc": "where the Transformer block normalises",
    },
    {
        "name": "embed_std",
        "kind": "float",
        "default": 0.02,
        "minimum": 0.0,
        "doc": "standard deviation of the initial [CLS] token and positional embeddings",
    },
]

SUITES: dict[str, dict[str, Any]] = {
    "toy/spurious": {
        "summary": "key-value retrieval with a spurious shortcut: how often training finds the true rule",
        "tasks": ["retrieval"],
        "metric": "success_rate",
        "selection": "last",
        "unit": "%",
        "higher_is_better": True,
        "paper": {"retrieval": {"standard": 25.0, "qnorm": 49.0, "quest": 58.0}},
        "paper_source": "QUEST (arXiv 2604.00199), figure 3 / section 2.2",
        "options": OPTIONS,
        "plots": "quest_bench.toy_plots:plots",
        "needs": None,
    },
}
