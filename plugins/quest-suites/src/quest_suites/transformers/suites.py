"""The suites of this plugin as data."""

from __future__ import annotations

from typing import Any

from quest_suites.declaring import number, timed, whole

MODELS = ["bert", "roberta", "vit", "gpt2", "llama", "qwen3", "mistral", "bart", "t5", "decode-mha", "decode-gqa"]

SUITES: dict[str, dict[str, Any]] = {
    "transformers/bytes-lm": {
        "summary": "a decoder of four layers predicts the bytes of Python's own documentation",
        "tasks": ["gpt2", "llama"],
        "heads": 4,
        "metric": "perplexity",
        "higher_is_better": False,
        "options": [
            whole("steps", 800, "training steps"),
            number("lr", 0.003, "highest learning rate of AdamW"),
            whole("width", 64, "features of a token", 4),
        ],
    },
    "time/transformers": timed(
        "a training step of small models, and decoding with a full cache, against transformers' own sdpa",
        MODELS,
        12,
        whole("length", 256, "tokens; a ViT has 257"),
        whole("batch", 4, "sequences a step"),
        whole("past", 2048, "tokens before those decoded"),
        least=True,
    ),
}
