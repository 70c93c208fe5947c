"""A stand-in for Pointcept's CUDA extension: `knn_query`, by which Sonata and Concerto match points of two views."""

import itertools

import torch
from torch import Tensor


def knn_query(nsample: int, xyz: Tensor, offset: Tensor, new_xyz: Tensor, new_offset: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest point of the same cloud: which [m, 1], int32, and how far away.

    Args:
        nsample: 1.
        xyz: the points that are looked for [n, 3], `offset` where their clouds end [B].
        new_xyz: the points whose neighbors they are [m, 3], `new_offset` where their clouds end [B].
    """
    assert nsample == 1
    found = []
    begins = [[0, *ends.tolist()] for ends in (offset, new_offset)]
    for (a, b), (c, d) in zip(*map(itertools.pairwise, begins), strict=True):
        # Not by a product of matrices, which loses what little there is between near points.
        away = torch.cdist(new_xyz[c:d], xyz[a:b], compute_mode="donot_use_mm_for_euclid_dist")
        distance, which = away.min(1, keepdim=True)
        found.append(((which + a).int(), distance))
    index, distance = map(torch.cat, zip(*found, strict=True))
    return index, distance
