"""QUEST attention and its relatives for PyTorch.

>>> import quest_core
>>> out = quest_core.attention(q, k, v, "quest")                     # [B, H, N, D] in, [B, H, N, D] out
>>> layer = quest_core.Attention(256, 8, attention="quest")          # with projections, masks and cache
>>> model, report = quest_core.inject(model, "quest")                # in a model that exists already
"""

from . import _torch as _torch
from .cache import Cache as Cache
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
from .hosts.adapter import Adapter as Adapter
from .hosts.adapter import Capabilities as Capabilities
from .hosts.adapter import Site as Site
from .hosts.inject import Report as Report
from .hosts.inject import inject as inject
from .hosts.inject import uninject as uninject
from .layer import Attention as Attention
from .mechanism import Mechanism as Mechanism
from .mechanism import attention as attention
from .mechanisms.base import Family as Family
from .mechanisms.base import Grouping as Grouping
from .mechanisms.base import Normalizer as Normalizer
from .mechanisms.base import Output as Output
from .mechanisms.base import Score as Score
from .mechanisms.base import ScoreMod as ScoreMod
from .mechanisms.elliptical import chain as chain
from .multihead import MultiheadAttention as MultiheadAttention
from .registry import Option as Option
from .registry import list_mechanisms as list_mechanisms
from .registry import register as register
from .tools.calibration import CalibrationReport as CalibrationReport
from .tools.calibration import calibrate as calibrate
from .tools.clip import QKClip as QKClip
from .tools.maps import attention_maps as attention_maps
from .tools.monitor import Monitor as Monitor
from .tools.packing import PackingPlan as PackingPlan
from .tools.packing import attention_packed as attention_packed
from .tools.watch import Watch as Watch

__version__ = "0.1.0"
