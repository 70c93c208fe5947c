"""MmdetAdapter: where mmdet's attention is."""

import inspect
import re
from dataclasses import replace
from typing import Any, ClassVar

from mmdet.models import detectors
from torch import nn

from quest_core.hosts.adapter import Site
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

    def site(self, path: str, module: Any, kind: Any, model: nn.Module) -> Site:
        """Return a site. DINO and its like hide queries of the decoder from each other in training."""
        site = super().site(path, module, kind, model)
        found = re.fullmatch(r"(?:(.+)\.)?decoder\.layers\.\d+\.self_attn", path)
        if found and hasattr(model.get_submodule(found[1] or ""), "dn_query_generator"):
            return replace(site, capabilities=replace(site.capabilities, pairs=True))
        return site
