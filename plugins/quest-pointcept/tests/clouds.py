"""Small clouds and models for tests."""

from typing import Any

import torch
from torch import Tensor
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation


def clouds(*counts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds of these many points in different voxels: features [N, 4], grid coordinates [N, 3], cloud [N]."""
    cells = torch.cat([torch.randperm(16**3)[:count] for count in counts])
    grid = torch.stack([cells // 256, cells // 16 % 16, cells % 16], dim=1)
    return torch.randn(sum(counts), 4), grid, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


ENCODER = {
    "in_channels": 4, "strides": (2,), "encoder_depths": (2, 2), "encoder_channels": (16, 32),
    "encoder_num_heads": (2, 4), "encoder_patch_size": (8, 8), "drop_path": 0.0, "use_flash_attn": False,
}  # fmt: skip
"""Options of a small encoder of torch-pointcloud, and of one with a decoder."""
SEGMENTATION = {
    **ENCODER, "num_classes": 5, "decoder_depths": (1,), "decoder_channels": (16,), "decoder_num_heads": (2,),
    "decoder_patch_size": (8,),
}  # fmt: skip


def segmentation(seed: int = 0, **options: Any) -> PointTransformerV3Segmentation:
    torch.manual_seed(seed)
    return PointTransformerV3Segmentation(**SEGMENTATION | options)
