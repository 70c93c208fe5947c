"""QUEST attention and its relatives for PyTorch.

>>> import quest_core
>>> out = quest_core.attention(q, k, v, "quest")                     # [B, H, N, D] in, [B, H, N, D] out
>>> layer = quest_core.Attention(256, 8, attention="quest")          # with projections, masks and cache
>>> model, report = quest_core.inject(model, "quest")                # in a model that exists already
"""

from .adapter import Adapter as Adapter
from .adapter import Capabilities as Capabilities
from .adapter import Site as Site
from .attention import Attention as Attention
from .cache import Cache as Cache
from .calibration import CalibrationReport as CalibrationReport
from .calibration import calibrate as calibrate
from .checkpoints import AttentionMismatchWarning as AttentionMismatchWarning
from .config import AttentionConfig as AttentionConfig
from .config import AttentionSpec as AttentionSpec
from .errors import CheckpointError as CheckpointError
from .errors import ConfigError as ConfigError
from .errors import InjectionError as InjectionError
from .errors import InputError as InputError
from .errors import PluginError as PluginError
from .errors import QuestError as QuestError
from .errors import UnsupportedError as UnsupportedError
from .inject import Report as Report
from .inject import inject as inject
from .mechanisms.elliptical import chain as chain
from .mechanisms.mechanism import Mechanism as Mechanism
from .mechanisms.mechanism import attention as attention
from .mechanisms.mechanism import mechanism as mechanism
from .monitor import Monitor as Monitor
from .packing import PackingPlan as PackingPlan
from .packing import attention_packed as attention_packed
from .registry import available as available
from .torch_mha import MultiheadAttention as MultiheadAttention

__version__ = "0.1.0"
