"""Segmenter by mmengine's own Runner and its AmpOptimWrapper."""

import functools
import tempfile
import uuid
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("mmseg", reason="mmsegmentation is not installed in this Python")

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import runner
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

import quest_mmseg
from quest_suites.mmseg.scenes import LABELS, scene

from .training import Clock, HostTraining, compiler

environment = "quest-mmseg"

CONFIG = Path(quest_mmseg.__file__).parent / "configs" / "segmenter_laptop_scenes-64x64.py"
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"size": 72, "patch": 8, "width": 32, "heads": 4, "layers": 1, "images": 2, "batch": 2},
    "cuda": {"size": 512, "patch": 16, "width": 384, "heads": 6, "layers": 12, "images": 64, "batch": 8},
}


@functools.cache
def images(device):
    """Scenes as mmseg's datasets give them, made once: loading them is not what is timed."""
    index = np.zeros(256, dtype=np.int64)
    index[list(LABELS.values())] = range(len(LABELS))
    made = []
    for seed in range(SIZES[device]["images"]):
        image, labels, _ = scene(SIZES[device]["size"], np.random.default_rng(seed))
        truth = PixelData(data=torch.from_numpy(index[labels])[None])
        inputs = torch.from_numpy(image).permute(2, 0, 1).contiguous()
        made.append({"inputs": inputs, "data_samples": SegDataSample(gt_sem_seg=truth)})
    return made


class Watch(Clock, Hook):
    before_train_iter = Clock.begin

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.end(outputs["loss"])


class TestMmseg(HostTraining):
    host = "mmseg"
    distribution = packages_distributions()["mmseg"][0]  # mmsegmentation or onedl-mmsegmentation
    model = "Segmenter, ViT-S/16, 12 layers, width 384, 6 heads, 512x512, batch 8"
    half_on_cpu: ClassVar = dict.fromkeys(("bf16", "fp16"), "only available training on gpu, npu, mlu or musa")

    def train(self, attention, *, device, precision, steps, compiled=False):
        sizes = SIZES[device]
        shape, width = (sizes["size"], sizes["size"]), sizes["width"]
        config = Config.fromfile(CONFIG).model
        if attention is None:
            config.type = "EncoderDecoder"
            del config["attention"]
        else:
            config.attention = attention
        config.data_preprocessor.size = shape
        part = {"embed_dims": width, "num_heads": sizes["heads"]}
        part["drop_path_rate"] = 0.0  # a compiler draws other random numbers
        config.backbone.update(img_size=shape, patch_size=sizes["patch"], num_layers=sizes["layers"], **part)
        config.decode_head.update(in_channels=width, channels=width, **part)
        wrapper = {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-3 if device == "cpu" else 2e-4}}
        if precision != "fp32":
            wrapper |= {"type": "AmpOptimWrapper", "dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision]}
        watch = Watch(device)
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            patch.setattr(runner, "get_device", lambda: device)  # mmengine takes a GPU wherever there is one
            if compiled:
                torch.compiler.reset()
            runner.Runner(
                config,
                folder,
                train_dataloader={
                    "dataset": images(device),
                    "batch_size": sizes["batch"],
                    "num_workers": 0,
                    "sampler": {"type": "InfiniteSampler", "shuffle": True},
                },
                train_cfg={"type": "IterBasedTrainLoop", "max_iters": steps, "val_interval": steps + 1},
                optim_wrapper=wrapper,
                default_hooks={"logger": None, "checkpoint": None},
                custom_hooks=[watch],
                env_cfg={"dist_cfg": {"backend": "gloo"}},
                log_level="WARNING",
                default_scope="mmseg",
                randomness={"seed": 0},
                experiment_name=uuid.uuid4().hex,  # mmengine keeps runners by their name
                cfg={"compile": {"backend": compiler(device)}} if compiled else None,
            ).train()
        return watch.seen
