"""Small clouds for tests."""

import torch
from torch import Tensor


def clouds(*counts: int, features: int = 4, extent: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds of these many points in different voxels: features [N, C], grid coordinates [N, 3], cloud [N]."""
    grids, batch = [], []
    for number, count in enumerate(counts):
        cells = torch.randperm(extent**3)[:count]
        grids.append(torch.stack([cells // extent**2, cells // extent % extent, cells % extent], dim=1))
        batch.append(torch.full((count,), number))
    return torch.randn(sum(counts), features), torch.cat(grids), torch.cat(batch)
