"""mmdet's classes with the further arguments `attention`, `attention_from` and `allow_partial`.

>>> model = dict(type="quest_mmdet.DETR", attention="quest", ...)
>>> backbone = dict(type="quest_mmdet.SwinTransformer", attention="quest", ...)
"""

from mmdet.models import backbones, detectors

from .adapter import MmdetAdapter

globals().update(MmdetAdapter.register_with_attention((detectors, backbones)))
