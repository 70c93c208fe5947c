"""Mechanisms to compare QUEST with, one idea per file. Importing this package registers them."""

from .entmax import Entmax as Entmax
from .qk_norms import QKLayerNorm as QKLayerNorm
from .qk_norms import QKRMSNorm as QKRMSNorm
from .qk_norms import QKRMSNormAcross as QKRMSNormAcross
from .sinks import Sink as Sink
from .sinks import Softmax1 as Softmax1
from .softpick import Softpick as Softpick
from .ssmax import SSMax as SSMax
