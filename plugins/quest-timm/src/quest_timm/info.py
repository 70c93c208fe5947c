"""The plugin's description as data. Standard library only, because listing plugins executes only this file."""

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
    "suites": [
        {
            "suite": "vision/strokes",
            "summary": "a 4-layer ViT tells which direction most strokes of a generated image have; synthetic data",
            "tasks": ["strokes"],
            "metric": "accuracy",
            "unit": "%",
            "higher_is_better": True,
            "options": [
                {"name": "steps", "kind": "int", "default": 600, "doc": "training steps of 64 images", "minimum": 1},
                {"name": "strokes", "kind": "int", "default": 7, "doc": "strokes an image", "minimum": 1},
                {"name": "lr", "kind": "float", "default": 0.001, "doc": "learning rate of AdamW", "minimum": 0},
            ],
        }
    ],
}
