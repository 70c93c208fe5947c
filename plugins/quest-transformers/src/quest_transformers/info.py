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
    "suites": "quest_transformers.bench.suites:SUITES",
}
