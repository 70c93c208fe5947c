"""`quest list` and `quest check`: list the mechanisms, explain a text, test a mechanism."""

from __future__ import annotations

from ..catalogue import parts
from ..config import AttentionConfig
from ..mechanism import Mechanism
from ..mechanisms import PARTS
from ..testing import check_mechanism
from ..testing.mechanisms import DIM, HEADS, brief
from ..testing.truth import missing
from .rendering import refusals, rows

AXIS_TITLES = {
    "score": "Scores: how queries and keys meet",
    "normalizer": "Normalizers: logits to weights",
    "grouping": "Groupings: which key/value head a query head uses",
    "family": "Families that never form the weights",
}


def show() -> int:
    """Print every mechanism: those of quest-core, then those of each other distribution under its name."""
    for axis, title in AXIS_TITLES.items():
        print(title)
        for part in PARTS:
            if part.axis == axis:
                print(*rows(part), sep="\n")
        print()
    for package in parts().packages:
        problem = f": not usable: {package.problem}; fix: {package.entry.fix}" if package.problem else ""
        print(f"From {package.entry.owner}{problem}")
        for part in package.parts:
            print(*rows(part), sep="\n")
        print()
    print("Join one of each with '+': quest+gqa(kv_heads=4). What is left out is standard, softmax, mha.")
    return 0


def explain(text: str) -> int:
    """Print what an attention means: its parts with formula and source, its options, and what it refuses."""
    config = AttentionConfig.parse(text)
    print(f"valid: {config}")
    for (axis, name), part in zip(config.parts, config.specs(), strict=True):
        print(f"  {axis:<11} {name:<12} {part.summary}")
        print(f"    {part.source}; from {parts().owner(name)}")
        for option in part.options:
            value = config.option(option.name)
            print(f"    {option.name} = {'null' if value is None else value}: {option.doc}; takes {option.allowed}")
    refused = [f"  refuses {words}: '{part.name}'" for part in config.specs() for words in refusals(part)]
    print(*(refused or ["  refuses nothing that a host may ask for"]), sep="\n")
    shapes = [part.name for part in config.specs() if part.learnable]
    print(f"  parameters: {'added by ' + ', '.join(shapes) if shapes else 'none of its own'}")
    return 0


def check(text: str) -> int:
    """Test what a mechanism declares, and print a row a check; returns 0 if it keeps all of it, else 1."""
    config = AttentionConfig.parse(text)
    print(f"testing {config}")
    outcomes = check_mechanism(config, raises=False)
    for outcome, message in zip(outcomes, brief(outcomes), strict=True):
        print(f"  {'ok' if outcome.passed else 'FAILED':<8} {outcome.check.replace('_', ' ')}")
        if message:
            print(f"           {message}")
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"{len(outcomes)} checks, {failed} failed" if failed else f"{len(outcomes)} checks, all passed")
    if not failed:
        for name in missing(Mechanism(config, num_heads=HEADS, head_dim=DIM, projected=True)):
            print(f"not compared with a formula, because the Part of '{name}' has no reference")
    return 1 if failed else 0
