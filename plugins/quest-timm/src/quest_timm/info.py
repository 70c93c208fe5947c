"""The plugin as data. INFO is a literal, because core reads this file without running it."""

from __future__ import annotations

from typing import Any

INFO: dict[str, Any] = {
    "name": "timm",
    "host": "timm",
    "module": "timm",
    "api": (1, 0),
    "summary": "vision transformers of timm",
    "capabilities": {},
    "leaves_alone": [
        "ChannelAttn",
        "CoordAttn",
        "EfficientLocalAttn",
        "LightChannelAttn",
        "LightSpatialAttn",
        "SimpleCoordAttn",
        "SpatialAttn",
        "SplitAttn",
        "StripAttn",
    ],
    "suites": "quest_timm.bench.suites:SUITES",
}
