"""Eager: every mechanism on every layout, type and mask."""

from __future__ import annotations

import itertools

import pytest
import torch

import quest_core
from devtools import versions
from quest_core.mechanisms.naive import hidden
from quest_core.registry import mechanisms

from .cases import CAUSAL, DTYPES, LAYOUTS, STRUCTURED, SUBJECTS, Cell, Subject, check, gradients, masks_of


def run(cell: Cell) -> None:
    """Raise unless output and gradients are those of the reference."""
    made = cell.made()
    tensors = made.tensors()
    got = gradients(made.seeded(made.call), made.named(), tensors, cell.dtype)
    check(made, tensors, got)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_layouts(subject: Subject, layout: str) -> None:
    for dtype in (torch.float64, lower(SUBJECTS.index(subject) + list(LAYOUTS).index(layout))):
        run(Cell(subject, layout, dtype))


def lower(turn: int) -> torch.dtype:
    """Return float32, bfloat16 and float16 in turn."""
    return DTYPES[1 + turn % 3]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_masks(subject: Subject) -> None:
    wrong, lacking, row = [], [], SUBJECTS.index(subject)
    causal, cross = ((False, True) if able else (False,) for able in (subject.causal, subject.cross))
    cells = list(itertools.product(enumerate(masks_of(subject)), causal, cross))
    for (i, mask), is_causal, crossed in cells:
        layout = ("contiguous", "packed", "chunk", "transposed", "one head")[(i + is_causal) % 5]
        turn = row + i + is_causal + crossed
        dtype = lower(turn // 2) if turn % 2 else torch.float64
        cell = Cell(subject, layout, dtype, mask, is_causal, crossed)
        try:
            run(cell)
        except Exception as error:
            if (why := versions.lacks(error)) is not None:
                lacking.append(why)
                continue
            wrong.append(f"{cell}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    if len(lacking) == len(cells):
        pytest.skip(lacking[0])


UNSEEN = ("sinkhorn", "kdgqa", "pgqa")
"""What declares that a result depends on keys that only other queries see."""


@pytest.mark.parametrize("mask", STRUCTURED)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
@pytest.mark.drawn(120)
def test_structured_masks(subject: Subject, mask: str) -> None:
    """The formula, and no change of what does not see a token that changes; or a refusal by name."""
    if subject.key_masks or (not subject.causal and mask in CAUSAL):
        with pytest.raises(quest_core.UnsupportedError, match=r"takes only masks of keys|cannot be causal"):
            run(Cell(subject, mask=mask))
        return
    shift = SUBJECTS.index(subject) + list(STRUCTURED).index(mask)
    for cross in (False, True) if subject.cross else (False,):
        for dtype in (torch.float64, lower(shift)):
            run(Cell(subject, "contiguous", dtype, mask, cross=cross))
        made = Cell(subject, "contiguous", mask=mask, cross=cross).made()
        q, k, v, given = made.tensors()
        seen = ~hidden(given).expand(*q.shape[:3], k.shape[2])
        call = made.seeded(made.call)
        made.module.eval()  # training changes the sizes of dgqa
        out = call(made.named(), q, k, v, given)
        differ = []
        for token in range(k.shape[2]):
            other, values = k.clone(), v.clone()
            other[:, :, token], values[:, :, token] = 3 * torch.randn(2, k.shape[1], k.shape[3]), 5.0
            blind = ~seen[..., token]
            now = call(made.named(), q, other, values, given)
            differ.append(float((now - out)[blind].detach().abs().max()) if blind.any() else 0.0)
        if not any(part in subject.name for part in UNSEEN):
            assert max(differ) < 1e-12, differ


def test_what_is_declared_of_unseen_keys() -> None:
    declared = {name for name, part in mechanisms().items() if "unseen" in part.reads}
    assert declared == set(UNSEEN)
    assert not any(mechanisms()[name].causal for name in declared)


OVERLAPPING = {  # shape, strides
    "one query for all tokens": ((1, 2, 7, 24), (1, 0, 0, 1)),
    "windows of tokens": ((2, 4, 7, 8), (56, 14, 1, 1)),
    "windows of heads": ((2, 4, 7, 8), (77, 1, 11, 1)),
}


@pytest.mark.parametrize("layout", OVERLAPPING)
@pytest.mark.parametrize("name", ["standard", "quest"])
def test_overlapping_queries(name: str, layout: str) -> None:
    """PyTorch's kernel gives such an output strides in which it writes past its rows."""
    shape, strides = OVERLAPPING[layout]
    q = torch.randn(500).as_strided(shape, strides)
    k, v = torch.randn(2, *shape[:2], 67, shape[3])
    for _ in range(20):  # it shows where the memory of the output was not zero
        junk = [torch.full((q.numel(),), torch.nan) for _ in range(20)]
        del junk
        out = quest_core.attention(q, k, v, name)
        torch.testing.assert_close(out, quest_core.attention(q.contiguous(), k, v, name))
