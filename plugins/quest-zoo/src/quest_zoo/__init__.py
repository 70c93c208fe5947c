"""Mechanisms to compare QUEST with, one idea per file. Importing this package registers them."""

from .alibi import ALiBi as ALiBi
from .diff import Difference as Difference
from .diff import DifferentialSoftmax as DifferentialSoftmax
from .diff import PairNorm as PairNorm
from .entmax import Entmax as Entmax
from .gates import Forget as Forget
from .gates import Gate as Gate
from .key_scales import FractionalKeyNorm as FractionalKeyNorm
from .key_scales import KeyScale as KeyScale
from .key_scales import QuestGain as QuestGain
from .qk_norms import QKLayerNorm as QKLayerNorm
from .qk_norms import QKRMSNorm as QKRMSNorm
from .qk_norms import QKRMSNormAcross as QKRMSNormAcross
from .sinks import Sink as Sink
from .sinks import Softmax1 as Softmax1
from .softcap import SoftCap as SoftCap
from .softpick import Softpick as Softpick
from .ssmax import SSMax as SSMax
from .xsa import ExclusiveOutput as ExclusiveOutput
