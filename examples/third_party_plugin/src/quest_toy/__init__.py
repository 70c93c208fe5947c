"""QUEST attention in stand_in: import this package, and its models accept `attention=`.

>>> import quest_toy, stand_in
>>> model = stand_in.Model(16, 4, depth=2, attention="quest")
"""

from .adapter import ToyAdapter as ToyAdapter

ToyAdapter().install()
