"""The plugin as data. INFO is a literal, because core reads this file without running it."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "fairseq",
    "host": "fairseq",
    "module": "fairseq",
    "api": (1, 0),
    "summary": "language models and translation with fairseq's Transformers",
    "capabilities": {"ordered": True, "causal": True, "cached": True},
    "suites": "quest_fairseq.bench.suites:SUITES",
}
