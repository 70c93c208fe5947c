"""The formulas, one family a file, and what an author needs: https://quest-attention.github.io/quest/writing-a-mechanism/"""

from torch import Tensor as Tensor

from ..cache import Cache as Cache
from ..compat import wider as wider
from ..ops import (
    local as local,
)
from ..ops import unit as unit
from ..ops import (
    visible as visible,
)
from . import aft, aft_conv, elliptical, groupings, linear, normalizers, scores
from .base import (
    Dims as Dims,
)
from .base import (
    Family as Family,
)
from .base import (
    Grouping as Grouping,
)
from .base import (
    Normalizer as Normalizer,
)
from .base import (
    Score as Score,
)
from .part import CAUSAL as CAUSAL
from .part import POINTWISE as POINTWISE
from .part import READS as READS
from .part import Option as Option
from .part import Part as Part

_FILES = (scores, elliptical, normalizers, groupings, linear, aft, aft_conv)
PARTS = tuple(part for file in _FILES for part in file.PARTS)
