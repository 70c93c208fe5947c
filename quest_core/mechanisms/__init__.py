"""The formulas, a file per axis or family; importing this package registers them.

How to write one: https://quest-attention.github.io/quest/writing-a-mechanism/
"""

from torch import Tensor as Tensor

from ..cache import Cache as Cache
from ..compat import wider as wider
from ..ops import local as local
from ..ops import unit as unit
from ..ops import visible as visible
from ..registry import READS as READS
from ..registry import Option as Option
from ..registry import register as register
from . import aft, aft_conv, elliptical, groupings, linear, normalizers, scores  # noqa: F401
from .base import Dims as Dims
from .base import Family as Family
from .base import Grouping as Grouping
from .base import Normalizer as Normalizer
from .base import Output as Output
from .base import Score as Score
from .base import ScoreMod as ScoreMod
