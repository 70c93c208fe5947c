"""What the installed PyTorch is too old for, as reasons to skip tests. The pytest plugin applies them."""

import re

import pytest
import torch

from quest_core.compat import VERSION
from quest_core.errors import UnsupportedError

PREFIX = f"PyTorch {torch.__version__} "
"""How a reason begins."""


LIMITS_OF_2_5 = (
    "Cannot access data pointer of Tensor that doesn't have storage",  # tolist() under torch.func
    "Could not guard on data-dependent expression",  # torch.export of a size that only the run knows
    "Constraints violated",  # torch.export of formulas over a dynamic size
    "FrozenDataClassVariable(AttentionConfig) is not a constant",  # torch.compile of a frozen dataclass as an argument
    "call torch._dynamo.disable() wrapped function",  # torch.export of a disabled function
)
"""Texts of errors that PyTorch 2.5 raises in its exporter, its compiler and torch.func, and later versions do not."""


def needs_torch(version: str, what: str) -> None:
    """Skip the test unless PyTorch `version`, such as "2.6", or a newer one is installed.

    ``@pytest.mark.needs_torch("2.6", "torch.onnx.export(dynamo=True)")`` does the same before the test starts.
    """
    if tuple(map(int, version.split("."))) > VERSION:
        pytest.skip(f"{PREFIX}is older than {version}, which {what} needs")


def lacks(error: BaseException | None) -> str | None:
    """Return why `error` is a limit of the installed PyTorch, or None.

    It is one if quest_core refuses for that reason, or if PyTorch 2.5 raises one of the errors of LIMITS_OF_2_5.
    """
    text = str(error)
    if isinstance(error, UnsupportedError) and re.search(r"needs PyTorch (\d+\.\d+) or newer", text):
        return f"{PREFIX}is refused: {text}"
    said = text.splitlines() if isinstance(error, AssertionError) else [text]  # a grid asserts that a list is empty
    lines = [line for line in said if line]
    if VERSION < (2, 6) and lines and all(any(limit in line for limit in LIMITS_OF_2_5) for line in lines):
        return f"{PREFIX}cannot: {lines[0]}"
    return None
