"""QUEST attention in Point Transformer V3: import this package, and its models accept `attention=`.

In a configuration of Pointcept:

>>> custom_imports = dict(imports=["quest_pointcept"], allow_failed_imports=False)
>>> model = dict(backbone=dict(attention="quest"))

With torch-pointcloud:

>>> import quest_pointcept
>>> model = PointTransformerV3Segmentation(in_channels=4, num_classes=16, attention="quest")
"""

from .adapter import PointceptAdapter as PointceptAdapter
from .on_cpu import train_on_cpu as train_on_cpu

PointceptAdapter().install()
