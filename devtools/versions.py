"""What the installed PyTorch is too old for, as reasons to skip tests. The pytest plugin applies them."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from quest_core.compat import VERSION
from quest_core.errors import UnsupportedError

PREFIX = f"PyTorch {torch.__version__} "
"""How a reason begins. Such a skip is not a failure with ``QUEST_NO_SKIP=1``, because no package would change it."""


def needs_torch(version: str, what: str) -> None:
    """Skip the test unless PyTorch `version`, such as "2.4", or a newer one is installed.

    ``@pytest.mark.needs_torch("2.4", "torch.library.opcheck")`` does the same before the test starts.

    Args:
        version: one in which `what` works.
        what: the feature of PyTorch that the test uses.
    """
    if tuple(map(int, version.split("."))) > VERSION:
        pytest.skip(f"{PREFIX}is older than {version}, which {what} needs")


def lacks(error: BaseException | None) -> str | None:
    """Return why `error` is a limit of the installed PyTorch, or None.

    It is one if quest_core refuses for that reason, or if PyTorch computes nothing in float16 on a CPU.
    """
    text = str(error)
    if isinstance(error, UnsupportedError) and re.search(r"needs PyTorch (\d+\.\d+) or newer", text):
        return f"{PREFIX}is refused: {text}"
    if isinstance(error, RuntimeError) and "not implemented for 'Half'" in text and not has_half():
        return f"{PREFIX}has no float16 products on a CPU"
    return None


@functools.cache
def has_half() -> bool:
    """Whether PyTorch multiplies batches of matrices of float16 on a CPU."""
    x = torch.zeros(1, 1, 1, dtype=torch.float16)
    try:
        torch.bmm(x, x).softmax(-1)
    except RuntimeError:
        return False
    return True
