"""Every mechanism under every transform: right, or refused by name, as docs/transforms.md says."""

import os
import random

import pytest
import torch

from .cases import BY_NAME, SUBJECTS, Cell
from .outcomes import committed, recorded, run_all
from .transforms import SLOW, TRANSFORMS

COVERED = ("compile, one length", "jit.trace", "FakeTensorMode", "func.vmap")
"""Of the transforms that take long, those that the short tier runs with every mechanism, once."""
SAMPLED = ("compile, any length", "export", "ONNX", "make_fx", "make_fx, any length")
"""The others, which the short tier runs with `quest` and with a subject that the seed of the run draws."""


def covering():
    """Return `quest` and few others that have every mechanism, those with many mechanisms first."""
    parts = {s.name: {part.name for part in s.config().components} for s in SUBJECTS}
    found = [BY_NAME["quest"]]
    missing = set().union(*parts.values()) - parts["quest"]
    while missing:
        found.append(max(SUBJECTS, key=lambda s: len(parts[s.name] & missing)))
        missing -= parts[found[-1].name]
    return found


def _has_many_steps(subject):
    return any(part.chained or part.name == "pgqa" for part in subject.config().components)


def cells():
    """Yield every subject and transform; what the short tier leaves out is marked slow."""
    for transform in TRANSFORMS:
        chosen = covering() if transform in COVERED else [BY_NAME["quest"]]
        others = [subject for subject in SUBJECTS if subject not in chosen]
        if "any length" in transform:  # which takes 12 s where layers are chained, or weights get noise
            others = [subject for subject in others if not _has_many_steps(subject)]
        draw = random.Random(f"{os.environ.get('QUEST_TEST_SEED')} {transform}")
        chosen.append(draw.choice(others))
        for subject in SUBJECTS:
            long = transform in (*COVERED, *SAMPLED)
            marks = [pytest.mark.slow] if long and subject not in chosen else []
            yield pytest.param(subject, transform, marks=marks, id=f"{subject.name}-{transform}")


@pytest.mark.parametrize(("subject", "transform"), list(cells()))
def test_right_or_refused(subject, transform):
    results = run_all(subject, transform)
    if all(one.lacking for one in results):
        pytest.skip(results[0].lacking)
    wrong = [f"{one.cell}: {one.wrong}" for one in results if one.wrong]
    assert not wrong, "\n".join(wrong)
    said = committed(subject, transform)
    assert said is None or said == recorded(results), "docs/transforms.md is out of date: python -m tests.grid.outcomes"


@pytest.mark.slow
@pytest.mark.parametrize("transform", SLOW)
@pytest.mark.parametrize("name", ["quest", "quest+gqa", "quest+sigmoid", "aft-full"])
def test_inductor(name, transform):
    for layout in ("packed", "chunk"):
        SLOW[transform](Cell(BY_NAME[name], layout, torch.float32, "keys", is_causal=True).made())
