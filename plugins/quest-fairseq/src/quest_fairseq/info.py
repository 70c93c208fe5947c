"""The plugin as data. Standard library only, because listing plugins executes only this file."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "fairseq",
    "host": "fairseq",
    "module": "fairseq",
    "api": (1, 0),
    "summary": "language models and translation with fairseq's Transformers",
    "capabilities": {"ordered": True, "causal": True, "cached": True},
    "install": "pip install --no-deps ve-fairseq==0.12.3, and what fairseq imports (see the README of quest-fairseq)",
    "architectures": ["quest_transformer_lm", "quest_transformer", "quest_transformer_xl"],
    "suites": "quest_fairseq.bench.suites:SUITES",
}
