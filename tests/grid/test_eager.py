"""Eager: every mechanism on every layout, type and mask."""

import itertools

import pytest
import torch

import quest_core
from devtools import versions

from .cases import DTYPES, LAYOUTS, SUBJECTS, Cell, check, gradients, masks_of


def run(cell):
    """Raise unless output and gradients are those of the reference."""
    made = cell.made()
    tensors = made.tensors()
    got = gradients(made.seeded(made.call), made.named(), tensors, cell.dtype)
    check(made, tensors, got)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_every_layout_equals_the_reference(subject, layout):
    for dtype in (torch.float64, lower(SUBJECTS.index(subject) + list(LAYOUTS).index(layout))):
        run(Cell(subject, layout, dtype))


def lower(turn):
    """Return float32, bfloat16 and float16 in turn."""
    return DTYPES[1 + turn % 3]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_masks(subject):
    wrong, lacking, row = [], [], SUBJECTS.index(subject)
    causal, cross = ((False, True) if able else (False,) for able in map(subject.can, ("causal", "cross")))
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


OVERLAPPING = {  # shape, strides
    "one query for all tokens": ((1, 2, 7, 24), (1, 0, 0, 1)),
    "windows of tokens": ((2, 4, 7, 8), (56, 14, 1, 1)),
    "windows of heads": ((2, 4, 7, 8), (77, 1, 11, 1)),
}


@pytest.mark.parametrize("layout", OVERLAPPING)
@pytest.mark.parametrize("name", ["standard", "quest"])
def test_overlapping_queries_give_what_their_copies_give(name, layout):
    """PyTorch's kernel gives such an output strides in which it writes past its rows."""
    shape, strides = OVERLAPPING[layout]
    q = torch.randn(500).as_strided(shape, strides)
    k, v = torch.randn(2, *shape[:2], 67, shape[3])
    for _ in range(20):  # it shows where the memory of the output was not zero
        junk = [torch.full((q.numel(),), torch.nan) for _ in range(20)]
        del junk
        out = quest_core.attention(q, k, v, name)
        torch.testing.assert_close(out, quest_core.attention(q.contiguous(), k, v, name))
