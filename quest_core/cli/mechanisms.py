"""`quest list` and `quest check`: list the mechanisms, explain a text, test a mechanism."""

import math

import torch

from ..config import AttentionConfig
from ..hosts.inject import NARROW_HEADS
from ..mechanism import Mechanism
from ..registry import Component, mechanisms, owner, packages

AXIS_TITLES = {
    "score": "Scores: how queries and keys meet",
    "normalizer": "Normalizers: logits to weights",
    "grouping": "Groupings: which key/value head a query head uses",
    "score_mod": "Score mods: what happens to logits before they are normalized",
    "output": "Outputs: what happens to the output of each head",
    "family": "Families that never form the weights",
}


def show() -> int:
    """Print every mechanism: those of quest-core, then those of each other distribution under its name."""
    for axis, title in AXIS_TITLES.items():
        if own := [part for part in mechanisms().values() if part.axis == axis and owner(part) == "quest-core"]:
            print(title, *(row for part in own for row in rows(part)), "", sep="\n")
    for package in packages():
        print(f"Not usable: {package}" if package.problem else f"From {package.owner}")
        for part in mechanisms().values():
            if owner(part) == package.owner:
                print(*rows(part), sep="\n")
        print()
    print("Join one of each with '+': quest+gqa(kv_heads=4). What is left out is standard, softmax, mha.")
    print("Sinks, gates and more QK norms: pip install quest-zoo")
    return 0


def explain(text: str) -> int:
    """Print what an attention means: its parts with formula and source, its options, and what it refuses."""
    config = AttentionConfig.parse(text)
    build(config)
    print(f"valid: {config}")
    for part in config.components:
        print(f"  {part.axis:<11} {part.name:<12} {part.formula()}")
        print(f"    {part.source}; from {owner(part)}")
        for option in part.options:
            value = config.option(f"{part.name}.{option.name}")
            print(f"    {option.name} = {'null' if value is None else value}: {option.doc}; takes {option.allowed}")
    refused = [f"  refuses {words}: '{part.name}'" for part in config.components for words in refusals(part)]
    print(
        *(refused or ["  works with causal and cross-attention, caches, dropout, rotary positions, sets and graphs"]),
        sep="\n",
    )
    shapes = [part.name for part in config.components if part.learnable]
    print(f"  parameters: {'added by ' + ', '.join(shapes) if shapes else 'none of its own'}")
    if any(part.unit_keys for part in config.components):
        print(f"  narrow heads: {NARROW_HEADS}")
    return 0


def check(text: str) -> int:
    """Test what a mechanism declares, and print a row per check; returns 0 if it keeps all of it, else 1."""
    from ..testing.mechanisms import brief, check_mechanism  # here, because they import torch.distributed.tensor
    from ..testing.truth import missing

    config = AttentionConfig.parse(text).without_initial_norms()  # which concern a model's projections
    build(config)
    print(f"testing {config}")
    outcomes = check_mechanism(config, raises=False)
    for outcome, message in zip(outcomes, brief(outcomes), strict=True):
        print(f"  {'ok' if outcome.passed else 'FAILED':<8} {outcome.check.replace('_', ' ')}")
        if message:
            print(f"           {message}")
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"{len(outcomes)} checks, {failed} failed" if failed else f"{len(outcomes)} checks, all passed")
    if not failed:
        for name in missing(config):
            print(f"not compared with a formula, because '{name}' has no reference")
    return 1 if failed else 0


def build(config: AttentionConfig) -> None:
    """Build a mechanism without memory; ConfigError if its options do not go together."""
    given = dict(config.options)
    heads = 8 * math.prod(given.get(name) or 1 for name in ("kv_heads", "ratio", "min_queries"))
    with torch.device("meta"):
        Mechanism(config, num_heads=heads, head_dim=64, projected=True)


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
