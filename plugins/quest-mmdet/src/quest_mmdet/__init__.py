"""QUEST attention in mmdetection: ``model = dict(type='quest_mmdet.DETR', attention='quest', ...)``.

mmengine imports this package by itself when a config names one of its types.
"""

from .adapter import MmdetAdapter as MmdetAdapter

MmdetAdapter().install()
