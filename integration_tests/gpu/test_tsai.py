"""tsai's TSTPlus by fastai's own trainer and mixed precision."""

import tempfile
from typing import Any, ClassVar

import pytest

pytest.importorskip("tsai", reason="tsai is not installed in this Python")

import numpy as np
import torch
from fastai.learner import Callback
from tsai.basics import TSClassification, TSClassifier

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on

from .training import Clock, HostTraining, Run, compiler

environment = "quest-tsai"

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"series": 64, "length": 70, "bs": 16, "d_model": 32, "n_heads": 4, "d_ff": 64, "n_layers": 2},
    "cuda": {"series": 1024, "length": 512, "bs": 64, "d_model": 512, "n_heads": 8, "d_ff": 1024, "n_layers": 4},
}


class Watch(Clock, Callback):
    order = 70
    before_batch = Clock.begin

    def after_batch(self):
        self.end(self.learn.loss)


class TestTsai(HostTraining):
    host = distribution = "tsai"
    model = "TSTPlus, 4 layers, width 512, 8 heads, 512 time steps, batch 64"
    half_on_cpu: ClassVar = {"bf16": torch.float32, "fp16": torch.float32}  # fastai's autocast is for CUDA only

    def train(self, attention, *, device, precision, steps, compiled=False):
        sizes = dict(SIZES[device])
        series, length, bs = (sizes.pop(key) for key in ("series", "length", "bs"))
        labels = np.arange(series) % 4
        phase = np.random.default_rng(0).uniform(0, 1, (series, 3, 1))
        x = np.sin(np.arange(length) * (labels[:, None, None] + 1) * 0.3 + phase).astype(np.float32)
        # As many series as the steps take, over and over; one is held out, for tsai wants a validation set.
        splits = ([i % (series - 1) for i in range(steps * bs)], [series - 1])
        torch.manual_seed(0)
        watch = Watch(device)
        learn = TSClassifier(
            x,
            labels,
            splits=splits,
            tfms=[None, TSClassification()],
            bs=[bs, bs],
            arch="TSTPlus",
            # Without passed-on scores, which no fused kernel returns.
            arch_config={**sizes, "res_attention": False, **({} if attention is None else {"attention": attention})},
            path=tempfile.gettempdir(),
            device=torch.device(device),
            seed=0,
            cbs=[watch],
        )
        if precision != "fp32":
            learn = learn.to_fp16() if precision == "fp16" else learn.to_bf16()
        if compiled:
            torch.compiler.reset()
            learn.model.compile(backend=compiler(device))
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-3)
        return Run(watch.seen.losses[:steps], watch.seen.seconds[:steps])
