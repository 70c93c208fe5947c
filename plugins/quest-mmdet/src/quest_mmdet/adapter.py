"""MmdetAdapter: where mmdet's attention is."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from mmdet.models import detectors
from torch import nn

from quest_core.errors import UnsupportedError
from quest_mmengine.adapter import MmengineAdapter
from quest_mmengine.layers import MultiheadAttention

from .layers import ConditionalAttention, SpatialReductionAttention, WindowMSA
from .registry import MODELS

REPLACEMENTS: dict[str, Any] = {
    "mmcv.cnn.bricks.transformer.MultiheadAttention": MultiheadAttention,
    "mmdet.models.layers.transformer.utils.ConditionalAttention": ConditionalAttention,
    "mmdet.models.backbones.pvt.SpatialReductionAttention": SpatialReductionAttention,
    "mmdet.models.backbones.swin.WindowMSA": WindowMSA,
}
"""Host class -> what replaces it."""

DETECTORS = {name for name, kind in vars(detectors).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
TYPES = frozenset({*DETECTORS, "SwinTransformer", "PyramidVisionTransformer", "PyramidVisionTransformerV2"})
"""mmdet's detectors and its backbones with attention, each registered as quest_mmdet.<name>."""


class MmdetAdapter(MmengineAdapter):
    """Every attention of mmdet's models that attends over tokens with queries, keys and values."""

    name: ClassVar[str] = "mmdet"
    package, types, models = "quest_mmdet", TYPES, MODELS
    leaves_alone: ClassVar = {"MultiScaleDeformableAttention": "deformable attention, no q·k"}
    replacements = REPLACEMENTS

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        """Refuse families in DINO and its like, which hide queries from each other in training."""
        denoising: list[Any] = [module for module in model.modules() if hasattr(module, "dn_query_generator")]
        for detector in denoising:
            for layer in detector.decoder.layers:
                config = drafts[layer.self_attn].attn.config if layer.self_attn in drafts else None
                if config is not None and config.family:
                    raise UnsupportedError(
                        f"attention '{config}' cannot be used in {type(detector).__name__}: its denoising queries are "
                        f"hidden from the others in training, and '{config}' has no weights that a mask could act on"
                    )
        super().connect(model, drafts)
