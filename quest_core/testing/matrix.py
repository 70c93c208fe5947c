"""The table of what a checkpoint does: saved with one attention, loaded by some door, into a model with another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

OUTCOMES = {"loads": "✓", "warns": "warning", "refused": "error", "unexpected": "unexpected key", "–": "–"}
"""What may come of it. "unexpected" is what PyTorch or the host says of the key that names the attention."""


def table(found: Mapping[tuple[str, str, str], str]) -> str:
    """Return a Markdown table: a row for each (door, checkpoint), a column for each model.

    Args:
        found: (door, checkpoint, model) -> a key of OUTCOMES.
    """
    models = list(dict.fromkeys(model for _, _, model in found))
    lines = [f"| by | checkpoint \\ model | {' | '.join(models)} |", "|---|---|" + ":-:|" * len(models)]
    for door, checkpoint in dict.fromkeys((door, checkpoint) for door, checkpoint, _ in found):
        cells = (OUTCOMES[found.get((door, checkpoint, model), "–")] for model in models)
        lines.append(f"| {door} | {checkpoint} | {' | '.join(cells)} |")
    return "\n".join(lines)


def committed(page: Path, name: str) -> str:
    """Return what stands on a page between ``<!-- generated: NAME -->`` and ``<!-- end of generated -->``."""
    found = re.search(
        rf"<!-- generated: {re.escape(name)} -->\n(.*?)\n<!-- end of generated -->", page.read_text(), re.S
    )
    if found is None:
        raise LookupError(f"{page} has no '<!-- generated: {name} -->'")
    return found[1]
