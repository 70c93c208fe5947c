"""What checkpoints are saved with and loaded into, and what came of loading one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from quest_core import AttentionMismatchWarning, CheckpointError
from quest_core.checkpoints import ENTRY

MODELS = {
    "stock": "None",
    "standard": "standard",
    "quest": "quest",
    "gqa": "quest+gqa(kv_heads=2)",
    "sigmoid": "sigmoid",
}
"""A model's name in the docs' table -> `attention` in its config."""


def outcome(load: Callable[[], object]) -> str:
    """Return a key of `quest_core.testing.matrix.OUTCOMES`, or what went wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load()
        except CheckpointError as error:
            return "refused" if "attention_from" in str(error) else str(error)
        except RuntimeError as error:
            if re.search(f"Unexpected key.*{ENTRY}", str(error)):
                return "unexpected"
            return "refused" if re.search(r"size mismatch for .*in_proj_weight", str(error)) else str(error)
    return "warns" if any(issubclass(w.category, AttentionMismatchWarning) for w in caught) else "loads"
