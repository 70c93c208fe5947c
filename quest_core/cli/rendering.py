"""A mechanism as text."""

from __future__ import annotations

from ..mechanisms.part import Part

MARKS = (
    ("learnable", True, "learnable"),
    ("reshapes", True, "changes projection shapes"),
    ("causal", False, "not causal"),
    ("ordered", True, "ordered tokens only"),
)
REFUSALS = (
    ("causal", False, "causal attention"),
    ("cross", False, "cross-attention"),
    ("cached", False, "decoding with a cache"),
    ("drops", False, "attention dropout"),
    ("weights", False, "returning the attention weights"),
    ("ordered", True, "sets and graphs, whose tokens have no order"),
    ("reshapes", True, "hosts whose projections cannot change their shape"),
)


def rows(part: Part) -> list[str]:
    """Return what `quest list` shows of a mechanism: a line, then one for each option."""
    marks = ", ".join(words for name, value, words in MARKS if getattr(part, name) == value)
    lines = [
        f"  {part.name:<16} {part.summary:<42} {part.source}" + (f"  [{marks}]" if marks else ""),
        *(f"    {o.name} = {'null' if o.default is None else o.default}: {o.doc}" for o in part.options),
    ]
    return ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines]  # of any package


def refusals(part: Part) -> list[str]:
    """Return what a mechanism refuses, each in a few words."""
    return [
        words + (f" ({part.causal_reason})" if name == "causal" else "")
        for name, value, words in REFUSALS
        if getattr(part, name) == value
    ]
