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


ENCODER = {
    "in_channels": 4, "strides": (2,), "encoder_depths": (2, 2), "encoder_channels": (16, 32),
    "encoder_num_heads": (2, 4), "encoder_patch_size": (8, 8), "drop_path": 0.0, "use_flash_attn": False,
}  # fmt: skip
"""Options of a small encoder of torch-pointcloud, and of one with a decoder."""
SEGMENTATION = {
    **ENCODER, "num_classes": 5, "decoder_depths": (1,), "decoder_channels": (16,), "decoder_num_heads": (2,),
    "decoder_patch_size": (8,),
}  # fmt: skip
