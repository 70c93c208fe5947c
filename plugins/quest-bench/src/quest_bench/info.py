"""What this plugin brings, as plain data. Standard library only: `quest list` and `quest bench ls` read it alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _toy_options() -> list[dict[str, Any]]:
    """The toy's options from the file beside this one; this module runs alone, without its package."""
    spec = importlib.util.spec_from_file_location("_quest_toy_options", Path(__file__).with_name("toy_options.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options: list[dict[str, Any]] = module.OPTIONS
    return options


INFO: dict[str, Any] = {
    "name": "bench",
    "api": (1, 0),
    "summary": "benchmark orchestrator (`quest bench`) and the spurious-correlation toy",
    "suites": [
        {
            "suite": "toy/spurious",
            "summary": "key-value retrieval with a spurious shortcut: how often training finds the true rule",
            "tasks": ["retrieval"],
            "metric": "success_rate",
            "unit": "%",
            "higher_is_better": True,
            "paper": {"retrieval": {"standard": 25.0, "qnorm": 49.0, "quest": 58.0}},
            "paper_source": "QUEST (arXiv 2604.00199), figure 3 / section 2.2",
            "options": _toy_options(),
            "plots": "quest_bench.toy_plots:plots",
            "needs": None,
        },
    ],
}
