"""The suites of this plugin as data. Standard library only, because `quest bench ls` executes only this file."""

from __future__ import annotations

from typing import Any

SUITES: dict[str, dict[str, Any]] = {
    "transformers/bytes-lm": {
        "summary": "a decoder of four layers predicts the bytes of Python's own documentation",
        "tasks": ["gpt2", "llama"],
        "heads": 4,
        "metric": "perplexity",
        "unit": "",
        "higher_is_better": False,
        "options": [
            {"name": "steps", "kind": "int", "default": 800, "doc": "training steps", "minimum": 1},
            {"name": "lr", "kind": "float", "default": 0.003, "doc": "highest learning rate of AdamW", "minimum": 0},
            {"name": "width", "kind": "int", "default": 64, "doc": "features of a token", "minimum": 4},
        ],
    },
    "time/transformers": {
        "summary": "a training step of small models, and decoding with a full cache, against transformers' own sdpa",
        "tasks": [
            "bert",
            "roberta",
            "vit",
            "gpt2",
            "llama",
            "qwen3",
            "mistral",
            "bart",
            "t5",
            "decode-mha",
            "decode-gqa",
        ],
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": "least time of stock"}, {"metric": "memory of stock"}],
        "options": [
            {"name": "length", "kind": "int", "default": 256, "doc": "tokens; a ViT has 257", "minimum": 1},
            {"name": "batch", "kind": "int", "default": 4, "doc": "sequences a step", "minimum": 1},
            {"name": "past", "kind": "int", "default": 2048, "doc": "tokens before those decoded", "minimum": 1},
            {"name": "rounds", "kind": "int", "default": 12, "doc": "how often each step is timed", "minimum": 2},
        ],
    },
}
