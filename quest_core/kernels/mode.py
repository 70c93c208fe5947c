"""``QUEST_KERNELS``: which paths the kernels may take, for debugging and for comparing them."""

from __future__ import annotations

import importlib.util
import os

from torch import Tensor

from ..errors import ConfigError, one_of

MODES = ("auto", "fused", "eager", "reference")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # it is imported only where it is used


def mode() -> str:
    """The value of ``QUEST_KERNELS``.

    - ``auto`` (default): the fastest path of those that have been measured where they run, and on CUDA the Triton
      kernel for unit keys, one pass in place of half a dozen.
    - ``fused``: a Triton kernel wherever one applies, also where `auto` takes none until it has been measured on a GPU.
    - ``eager``: plain PyTorch operations, with derivatives written by hand.
    - ``reference``: the plain formula and PyTorch's own derivative of it; packed sequences one at a time.

    Raises:
        ConfigError: when the environment variable is something else.
    """
    chosen = os.environ.get("QUEST_KERNELS", "auto")
    if chosen not in MODES:
        raise ConfigError(f"QUEST_KERNELS is {chosen!r}; {one_of(chosen, MODES)}")
    return chosen


def triton_takes(x: Tensor) -> bool:
    """Whether Triton kernels are asked for and run where `x` is: on CUDA, or anywhere under Triton's interpreter."""
    return mode() == "fused" and HAS_TRITON and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
