"""mmseg's classes with the further arguments `attention`, `attention_from` and `allow_partial`.

>>> model = dict(type="quest_mmseg.EncoderDecoder", attention="quest", ...)
>>> backbone = dict(type="quest_mmseg.VisionTransformer", attention="quest", ...)
"""

from mmseg.models import backbones, decode_heads, segmentors

from .adapter import MmsegAdapter

globals().update(MmsegAdapter.register_with_attention((segmentors, backbones, decode_heads)))
