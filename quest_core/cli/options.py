"""Options of a command line: a misspelt one is named with the nearest that exists."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ..errors import QuestError, one_of


def refuse_misspelt(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise QuestError for an option that `parser` does not have, before argparse complains of what is missing.

    An abbreviation is a misspelt option too: it would change its meaning when an option is added.
    """
    known = set(re.findall(r"--[a-z][\w-]*", parser.format_usage()))
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("-") and name not in {"-h", "--help", *known}:
            raise QuestError(f"{parser.prog} has no option '{name}'; {one_of(name, known)}")


def seconds(text: str) -> float:
    """Return a time limit; the type of an argument."""
    value = float(text)
    if not 0 < value <= 10**6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds from 0 to 1000000")
    return value
