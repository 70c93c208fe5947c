"""Shipped configs of QUEST offer a second attention in a comment: the same one with a start of its own."""

import re
from pathlib import Path

_OFFER = re.compile(r"^( *)# (.*\battention\b.*\binit=.*)$")


def with_start(path: Path) -> str:
    """Return the text of a config in which the commented attention replaces the one above it.

    The commented line has `attention` and `init=`; between it and the replaced line only comments may stand.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    offers = [i for i, line in enumerate(lines) if _OFFER.match(line)]
    assert len(offers) == 1, f"{path.name} has {len(offers)} commented lines with attention and init="
    replaced = next(i for i in range(offers[0] - 1, -1, -1) if not lines[i].lstrip().startswith("#"))
    lines[offers[0]] = _OFFER.sub(r"\1\2", lines[offers[0]])
    return "\n".join(lines[:replaced] + lines[replaced + 1 :]) + "\n"
