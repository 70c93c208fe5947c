"""The plugin as data. INFO is a literal, because core reads this file without running it."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "transformers",
    "host": "transformers",
    "module": "transformers",
    "api": (1, 0),
    "summary": "every model of Hugging Face transformers that calls its AttentionInterface",
    "capabilities": {"ordered": True},
    "architectures": ["BERT", "RoBERTa", "ViT", "GPT-2", "Llama", "Qwen2", "Qwen3", "Mistral", "BART", "T5"],
    "suites": [
        {
            "suite": "transformers/bytes-lm",
            "summary": "a decoder of four layers predicts the bytes of Python's own documentation",
            "tasks": ["gpt2", "llama"],
            "metric": "perplexity",
            "unit": "",
            "higher_is_better": False,
            "options": [
                {"name": "steps", "kind": "int", "default": 800, "doc": "training steps", "minimum": 1},
                {
                    "name": "lr",
                    "kind": "float",
                    "default": 0.003,
                    "doc": "highest learning rate of AdamW",
                    "minimum": 0,
                },
                {"name": "width", "kind": "int", "default": 64, "doc": "features of a token", "minimum": 4},
            ],
        }
    ],
}
