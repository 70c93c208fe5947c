"""The plugin as data. Standard library only, because listing plugins executes only this file."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "bench",
    "api": (1, 0),
    "summary": "benchmark orchestrator (`quest bench`) and the spurious-correlation toy",
    "suites": "quest_bench.suites:SUITES",
}
