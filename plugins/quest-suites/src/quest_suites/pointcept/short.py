"""Imported by the config of a smoke run: Pointcept's datasets hold a few scenes, and its Point Transformer V3 is small.

Pointcept's own classes build both, so the run takes every step of a long one.
"""

import sys
from typing import Any

from .own import SMOKE_SCENES

SIZES: dict[str, Any] = {
    "stride": (2, 2), "enc_depths": (1, 1, 1), "enc_channels": (24, 48, 96), "enc_num_head": (2, 4, 8),
    "enc_patch_size": (64, 64, 64), "dec_depths": (1, 1), "dec_channels": (24, 48), "dec_num_head": (2, 4),
    "dec_patch_size": (64, 64),
}  # fmt: skip


def shorten() -> None:
    """Wrap the two functions by which Pointcept's trainer builds its datasets and its model."""
    train: Any = sys.modules["pointcept.engines.train"]
    build_dataset, build_model = train.build_dataset, train.build_model

    def few_scenes(config: Any) -> Any:
        dataset = build_dataset(config)
        dataset.data_list = dataset.data_list[:SMOKE_SCENES]
        return dataset

    def small_model(config: Any) -> Any:
        backbone = config.get("backbone", {})
        if str(backbone.get("type", "")).startswith("PT-v3m") and config["type"] == "DefaultSegmentorV2":
            backbone.update(SIZES)
            config["backbone_out_channels"] = SIZES["dec_channels"][0]
        return build_model(config)

    train.build_dataset, train.build_model = few_scenes, small_model


shorten()
