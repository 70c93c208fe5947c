"""torch-pointcloud's Point Transformer V3 on generated scenes, by PyTorch's own mixed precision.

torch-pointcloud has no trainer, so the loop is here; Pointcept's own, at half precision, needs a checkout.
"""

import contextlib
import functools
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch_pointcloud", reason="torch-pointcloud is not installed in this Python")
pytest.importorskip("spconv", reason="spconv is not installed in this Python")

import torch
from spconv.cppconstants import CPU_ONLY_BUILD
from torch.nn.functional import cross_entropy
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

import quest_pointcept  # torch-pointcloud accepts attention= from here on
from quest_suites.pointcept import scenes
from quest_suites.pointcept.tasks import batches

from .training import Clock, HostTraining, compiler

environment = "quest-pointcept"

# scenes, rings and rays of a scene, meters of a voxel; then options of the model that differ from its defaults
SIZES: dict[str, tuple[int, int, int, float, dict[str, Any]]] = {
    "cpu": (
        2,
        8,
        40,
        1.0,
        {
            "strides": (2,),
            "encoder_depths": (1, 1),
            "encoder_channels": (16, 32),
            "encoder_num_heads": (2, 4),
            "encoder_patch_size": (32, 32),
            "decoder_depths": (1,),
            "decoder_channels": (16,),
            "decoder_num_heads": (2,),
            "decoder_patch_size": (32,),
        },
    ),
    "cuda": (8, 64, 1200, 0.05, {"encoder_patch_size": (1024,) * 5, "decoder_patch_size": (1024,) * 4}),
}


@functools.cache
def batch(device):
    """All scenes behind each other."""
    count, rings, rays, voxel, _ = SIZES[device]
    scans = [scenes.scan(seed, rings=rings, rays=rays) for seed in scenes.seeds("train", count)]
    options = {"batch_size": count, "grid_size": voxel}
    return next(batches(scans, options, np.random.default_rng(0), torch.device(device)))


class TestPointcept(HostTraining):
    host = "pointcept"
    distribution = "torch-pointcloud"
    model = "PTv3 of torch-pointcloud in its base size, patches of 1024 points, 8 scenes of a 64-ring sensor"
    half_on_cpu: ClassVar = {"bf16": "torch.bfloat16", "fp16": "got c10::Half instead"}  # spconv's CPU build

    def train(self, attention, *, device, precision, steps, compiled=False):
        if device == "cuda" and CPU_ONLY_BUILD:
            pytest.skip("spconv is its CPU build in this Python; install spconv-cu126 or another that fits the driver")
        quest_pointcept.train_on_cpu()
        torch.manual_seed(0)
        model = PointTransformerV3Segmentation(
            in_channels=4,
            num_classes=len(scenes.CLASSES),
            drop_path=0.0,
            # The stock model needs flash-attn for it; ours attends to patches of one size by the flash kernel anyway.
            use_flash_attn=False,
            **SIZES[device][-1],
            **({} if attention is None else {"attention": attention}),
        ).to(device)
        if compiled:
            torch.compiler.reset()
            # The attentions: compiling all of the model works, in pieces between spconv's calls, and takes minutes.
            for site in quest_pointcept.PointceptAdapter().sites(model):
                site.module.compile(backend=compiler(device))
        x, grid, scene, label = batch(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        clock = Clock(device)
        for _ in range(steps):
            clock.begin()
            with contextlib.nullcontext() if half is None else torch.autocast(device, half):
                loss = cross_entropy(model(x, grid, scene), label)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            clock.end(loss)
        return clock.seen
