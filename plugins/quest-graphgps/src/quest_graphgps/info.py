"""The plugin as data. Standard library only, because listing plugins executes only this file."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "graphgps",
    "host": "PyTorch Geometric",
    "module": "torch_geometric",
    "api": (1, 0),
    "summary": "graph Transformers of PyTorch Geometric and GraphGPS",
    "capabilities": {"ordered": False},
    "suites": "quest_graphgps.bench.suites:SUITES",
}
