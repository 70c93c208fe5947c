"""``QUEST_KERNELS``: which paths the kernels may take, for debugging."""

from __future__ import annotations

import os

from ..errors import ConfigError, one_of

MODES = ("auto", "eager")


def mode() -> str:
    """``auto`` (default: the fastest path that applies) or ``eager`` (plain PyTorch operations only).

    Raises:
        ConfigError: when the environment variable is something else.
    """
    chosen = os.environ.get("QUEST_KERNELS", "auto")
    if chosen not in MODES:
        raise ConfigError(f"QUEST_KERNELS is {chosen!r}; {one_of(chosen, MODES)}")
    return chosen
