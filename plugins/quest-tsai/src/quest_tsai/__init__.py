"""QUEST attention in tsai: import this package, and every attention architecture of tsai accepts `attention=`.

>>> import quest_tsai
>>> learn = TSClassifier(X, y, splits=splits, arch="TSTPlus", arch_config={"attention": "quest"})
"""

from .adapter import TsaiAdapter as TsaiAdapter

TsaiAdapter().install()
