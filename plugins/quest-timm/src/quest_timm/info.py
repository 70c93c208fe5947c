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
    "architectures": [
        "ViT, DeiT, DeiT-3, and others with timm.layers.Attention",
        "EVA, EVA-02, ViT-RoPE, DINOv3",
        "BEiT, BEiTv2",
        "Swin",
        "CrossViT",
        "CaiT (class attention only)",
        "MaxViT, MaxxViT, CoAtNet",
        "Hiera, NesT, PVTv2, Twins, VOLO (class attention only), CAFormer, ViT-RelPos",
    ],
    "suites": "quest_timm.bench.suites:SUITES",
}
