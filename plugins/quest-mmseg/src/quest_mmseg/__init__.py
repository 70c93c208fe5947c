"""QUEST attention in mmsegmentation: ``model = dict(type='quest_mmseg.EncoderDecoder', attention='quest', ...)``.

mmengine imports this package by itself when a config names one of its types.
"""

from .adapter import MmsegAdapter as MmsegAdapter

MmsegAdapter().install()
