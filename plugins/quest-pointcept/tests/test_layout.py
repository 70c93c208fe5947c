"""Patches: against the definition, cloud by cloud."""

import itertools

import pytest
import torch
from clouds import clouds
from stand_in import patches_by_definition, serialized

from quest_pointcept.layout import counts_of, lay_out, patches_of


@pytest.mark.parametrize("counts", [[1], [8], [7, 8, 9], [16, 8], [17, 3, 40], [5, 5], [64, 1, 1]])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_patches_are_those_of_the_definition(counts, size):
    patches = lay_out(counts, size, torch.device("cpu"))
    expected = patches_by_definition(counts, size)
    bounds = patches.plan.cu_seqlens.tolist()
    held = [patches.slots[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert held == [holds for holds, _ in expected]
    # Every point takes its output from the slot that is its own.
    own = [slot for (_, mine), start in zip(expected, bounds, strict=False) for slot in range(start, start + len(mine))]
    assert patches.rows.tolist() == own
    assert patches.slots[patches.rows].tolist() == list(range(sum(counts)))
    sizes = {len(holds) for holds in held}
    assert patches.size == (sizes.pop() if len(sizes) == 1 else None)
    assert patches.plan.longest == max(len(holds) for holds in held)


@pytest.mark.parametrize("counts", [[17, 3, 40], [5, 5], [2]])
def test_padding_fills_every_patch_to_the_longest(counts):
    patches = lay_out(counts, 8, torch.device("cpu"))
    padded = patches.padded
    expected = patches_by_definition(counts, 8)
    rows = padded.slots.unflatten(0, (-1, padded.size)).tolist()
    for row, (holds, _) in zip(rows, expected, strict=True):
        assert row[: len(holds)] == holds
    assert padded.real.sum(1).tolist() == [len(holds) for holds, _ in expected]
    assert padded.slots[padded.rows].tolist() == list(range(sum(counts)))
    assert padded.real.flatten()[padded.rows].all()


def test_a_layout_is_made_once_for_each_size():
    x, grid, batch = clouds(20, 9)
    point = serialized(x, grid, batch)
    assert patches_of(point, 4) is patches_of(point, 4)
    assert patches_of(point, 8) is not patches_of(point, 4)
    assert patches_of(point, 8).size == 8
    copied = type(point)(point)  # as Pointcept copies a Point; what lies in it must survive that
    assert patches_of(copied, 4) is patches_of(point, 4)


@pytest.mark.parametrize("size", [4, 30])
def test_an_entry_without_points_takes_no_patch(size):
    """Pointcept's augmentations can leave nothing of a cloud; its own layout passes over it where flash is on."""
    point = serialized(*clouds(20, 9))
    with_empty = type(point)(point, offset=torch.tensor([0, 20, 20, 29, 29]))
    for field in ("slots", "rows"):
        assert torch.equal(getattr(patches_of(with_empty, size), field), getattr(patches_of(point, size), field))
    assert counts_of(with_empty) == (20, 9)
