"""The nearest points that cpu/ finds in place of Pointcept's CUDA extension: against the definition."""

import runpy
from pathlib import Path

import pytest
import torch

POINTOPS = runpy.run_path(str(Path(__file__).parent / "cpu/pointops/__init__.py"))


@pytest.mark.parametrize("nsample", [1, 3, 8])
def test_neighbours_are_those_of_the_definition(nsample):
    ends, new_ends = [9, 9, 14], [4, 4, 11]  # the second entry has no points
    xyz, new_xyz = torch.rand(14, 3), torch.rand(11, 3)
    index, distance = POINTOPS["knn_query"](nsample, xyz, torch.tensor(ends), new_xyz, torch.tensor(new_ends))
    assert index.dtype == torch.int32
    for row in range(11):
        begin, end = (0, 9) if row < 4 else (9, 14)
        near = sorted((torch.dist(new_xyz[row], xyz[i]).item(), i) for i in range(begin, end))[:nsample]
        found = len(near)
        assert index[row, :found].tolist() == [i for _, i in near]
        assert distance[row, :found].tolist() == pytest.approx([away for away, _ in near], abs=1e-6)
        assert index[row, found:].tolist() == [-1] * (nsample - found)


def test_a_point_is_its_own_neighbour():
    xyz = 50 + torch.rand(30, 3)  # far from the origin, where a product of matrices would lose the differences
    index, distance = POINTOPS["knn_query"](1, xyz, torch.tensor([30]))
    assert index.flatten().tolist() == list(range(30))
    assert distance.eq(0).all()


def test_other_functions_say_that_they_are_missing():
    with pytest.raises(NotImplementedError, match=r"pointops.ball_query is a CUDA extension"):
        POINTOPS["__getattr__"]("ball_query")()
