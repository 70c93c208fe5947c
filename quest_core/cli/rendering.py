"""A mechanism as text."""

from __future__ import annotations

from ..registry import Component


def rows(part: type[Component]) -> list[str]:
    """Return what `quest list` shows of a mechanism: a line, then one for each option."""
    properties = {
        "learnable": part.learnable,
        "changes projection shapes": part.reshapes,
        "not causal": not part.causal,
        "ordered tokens only": "order" in part.reads,
    }
    marks = ", ".join(words for words, applies in properties.items() if applies)
    return [
        f"  {part.name:<16} {part.formula():<42} {part.source}" + (f"  [{marks}]" if marks else ""),
        *(f"    {o.name} = {'null' if o.default is None else o.default}: {o.doc}" for o in part.options),
    ]


def refusals(part: type[Component]) -> list[str]:
    """Return what a mechanism refuses, each in a few words."""
    properties = {
        f"causal attention ({part.causal_reason})": not part.causal,
        "cross-attention": not part.cross,
        "decoding with a cache": not part.cached,
        "attention dropout": not part.dropout,
        "returning the attention weights": part.axis == "family",
        "sets and graphs, whose tokens have no order": "order" in part.reads,
        "rotary positions": not part.compares,
        "hosts whose projections cannot change their shape": part.reshapes,
    }
    return [words for words, applies in properties.items() if applies]
