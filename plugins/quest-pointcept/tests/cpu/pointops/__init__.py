"""A stand-in for Pointcept's CUDA extension, of which the tests need one function: `knn_query`, here in PyTorch.

Point Transformer V3 calls none of it; Sonata's and Concerto's losses match the points of two views by it. The others
raise when they are called.
"""

import itertools

import torch
from torch import Tensor


def knn_query(
    nsample: int, xyz: Tensor, offset: Tensor, new_xyz: Tensor | None = None, new_offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest points of the same cloud: which [m, nsample], int32, -1 where a cloud has fewer; and how far away.

    Args:
        xyz: the points that are looked for [n, 3], `offset` where their clouds end [B].
        new_xyz: the points whose neighbors they are [m, 3], `new_offset` where their clouds end [B].
    """
    if new_xyz is None or new_offset is None:
        new_xyz, new_offset = xyz, offset
    index = torch.full((len(new_xyz), nsample), -1, dtype=torch.int32)
    distance = torch.full((len(new_xyz), nsample), 1e5)
    begins = [[0, *ends.tolist()] for ends in (offset, new_offset)]
    for (a, b), (c, d) in zip(*map(itertools.pairwise, begins), strict=True):
        # Not by a product of matrices, which loses what little there is between near points.
        away = torch.cdist(new_xyz[c:d], xyz[a:b], compute_mode="donot_use_mm_for_euclid_dist")
        near, which = away.topk(min(nsample, b - a), largest=False)
        index[c:d, : which.shape[1]], distance[c:d, : which.shape[1]] = (which + a).int(), near
    return index, distance


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> object:
        raise NotImplementedError(f"pointops.{name} is a CUDA extension, which these tests do without")

    return missing
