"""QUEST attention in timm: import this package, and `timm.create_model` accepts `attention=`.

>>> import timm, quest_timm
>>> model = timm.create_model("vit_tiny_patch16_224", attention="quest")
"""

from .adapter import TimmAdapter as TimmAdapter

TimmAdapter().install()
