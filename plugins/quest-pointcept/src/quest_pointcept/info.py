"""The plugin as data. Standard library only, because listing plugins executes only this file."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "pointcept",
    "host": "Pointcept",
    "module": "torch_pointcloud",
    # Pointcept is not a package. Its checkout is a host if it can be imported.
    "checkout": "pointcept",
    "api": (1, 0),
    "summary": "Point Transformer V3 in Pointcept and in torch-pointcloud",
    "install": 'pip install "quest-pointcept[host]" for torch-pointcloud, or put a checkout of Pointcept on PYTHONPATH',
    "capabilities": {"ordered": True, "narrows_keys": True},
    "suites": "quest_pointcept.bench.suites:SUITES",
}
