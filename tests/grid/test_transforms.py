"""Every mechanism under every transform: right, or refused by name, as docs/transforms.md says."""

from __future__ import annotations

import pytest
import torch

from .cases import BY_NAME, SUBJECTS, Cell, Subject
from .outcomes import committed, recorded, run_all
from .transforms import SLOW, TRANSFORMS


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_right_or_refused(subject: Subject, transform: str) -> None:
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
def test_inductor(name: str, transform: str) -> None:
    for layout in ("packed", "chunk"):
        SLOW[transform](Cell(BY_NAME[name], layout, torch.float32, "keys", is_causal=True).made())
