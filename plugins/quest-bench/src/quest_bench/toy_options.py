"""Options of the suite toy/spurious, as data: standard library only, so that listing the suite imports no torch."""

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
