"""QUEST attention in PyTorch Geometric and GraphGPS: import this package, and their layers take `attention`.

>>> import quest_graphgps
>>> conv = GPSConv(64, GINEConv(mlp), heads=4, attn_kwargs={"attention": "quest", "dropout": 0.5})

In GraphGym it is ``gnn.attention`` in the yaml, in GraphGPS ``gt.attention``.
"""

from .adapter import GraphGPSAdapter as GraphGPSAdapter

GraphGPSAdapter().install()
