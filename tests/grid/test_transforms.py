"""Every mechanism under every transform: right, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch

from .cases import DTYPES, LAYOUTS, SUBJECTS, Cell, Deviation, Raw, Subject, judge, masks_of
from .transforms import TRANSFORMS, Missing

# How many combinations of layout, type and mask a mechanism is run with. Compilers take seconds each.
BREADTH = {
    "compile, one length": 1,
    "compile, any length": 1,
    "export": 1,
    "ONNX": 1,
    "make_fx, any length": 1,
    "func.jacrev": 1,
}


def outcome(cell: Cell, transform: str) -> str:
    """'' if it is right, '✓ …' with a note, or the text of its refusal.

    Raises:
        Deviation: wrong numbers.
        Raw: an error that is no refusal by name.
        Missing: this PyTorch cannot do it.
    """
    made = cell.made()
    try:
        note = TRANSFORMS[transform](made)
    except (Missing, Deviation):
        raise
    except Exception as error:
        return judge(cell.subject, transform, error)
    return "" if note is None else f"✓ {note}"


def cells(subject: Subject, transform: str) -> list[Cell]:
    """A rotating choice of layout, type, mask and causality, and the layout that has been wrong before."""
    shift = SUBJECTS.index(subject) + 3 * list(TRANSFORMS).index(transform)
    kinds, masks = list(LAYOUTS), masks_of(subject)
    found = []
    for i in range(BREADTH.get(transform, 4)):
        step = shift + 5 * i
        layout = ("chunk", "one head")[i] if i < 2 and (i or transform not in BREADTH) else kinds[step % len(kinds)]
        dtype = DTYPES[step % 4] if transform != "ONNX" else DTYPES[step % 2]
        mask = masks[(step // 2) % len(masks)]
        if layout == "one token" and transform in BREADTH:
            layout = "chunk"
        found.append(Cell(subject, layout, dtype, mask, subject.causal and step % 3 == 0))
    return found


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_right_or_refused(subject: Subject, transform: str) -> None:
    wrong = []
    for cell in cells(subject, transform):
        try:
            outcome(cell, transform)
        except Missing as missing:
            pytest.skip(str(missing))
        except (Deviation, Raw) as error:
            wrong.append(f"{cell}: {error}")
    assert not wrong, "\n".join(wrong)


def test_types_of_the_grid() -> None:
    assert torch.float64 in DTYPES
