"""A mechanism as text."""

from __future__ import annotations

from ..mechanisms.part import Part


def rows(part: Part) -> list[str]:
    """Return what `quest list` shows of a mechanism: a line, then one for each option."""
    said = {
        "learnable": part.learnable,
        "changes projection shapes": part.reshapes,
        "not causal": not part.causal,
        "ordered tokens only": "order" in part.reads,
    }
    marks = ", ".join(words for words, applies in said.items() if applies)
    lines = [
        f"  {part.name:<16} {part.summary:<42} {part.source}" + (f"  [{marks}]" if marks else ""),
        *(f"    {o.name} = {'null' if o.default is None else o.default}: {o.doc}" for o in part.options),
    ]
    return ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines]  # of any package


def refusals(part: Part) -> list[str]:
    """Return what a mechanism refuses, each in a few words."""
    said = {
        f"causal attention ({part.causal_reason})": not part.causal,
        "cross-attention": not part.cross,
        "decoding with a cache": not part.cached,
        "attention dropout": not part.drops,
        "returning the attention weights": not part.weights,
        "sets and graphs, whose tokens have no order": "order" in part.reads,
        "rotary positions": not (part.compares or part.weights),
        "hosts whose projections cannot change their shape": part.reshapes,
    }
    return [words for words, applies in said.items() if applies]
