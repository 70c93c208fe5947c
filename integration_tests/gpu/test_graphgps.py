"""GraphGPS's network on PATTERN, by GraphGym's data module and PyTorch Lightning's trainer and mixed precision."""

import tempfile
from importlib.resources import files
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch_geometric", reason="torch_geometric is not installed in this Python")

import torch
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.imports import pl
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.graphgym.train import GraphGymDataModule

from quest_suites.graphgps import gps
from quest_suites.graphgps.data import GENERATORS

from .training import Clock, HostTraining, compiler

environment = "quest-graphgps"

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"graphs": 8, "batch": 4, "layers": 1, "width": 32, "heads": 4},
    "cuda": {"graphs": 600, "batch": 64, "layers": 6, "width": 256, "heads": 8},
}
PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Watch(Clock, pl.Callback):
    on_train_batch_start = Clock.begin

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.end(outputs["loss"])


class TestGraphGPS(HostTraining):
    host = "graphgps"
    distribution = "torch_geometric"
    model = "GPS, 6 layers, width 256, 8 heads, PATTERN's graphs of about 118 nodes, batch 64"
    # Graphs of unlike size are padded, and the mask keeps flash away.
    fused = frozenset({"flash", "cudnn", "efficient"})
    half_on_cpu: ClassVar = {
        "bf16": torch.bfloat16,
        "fp16": torch.bfloat16,
    }  # Lightning takes bf16 there, with a warning

    def train(self, attention, *, device, precision, steps, compiled=False):
        sizes = SIZES[device]
        set_cfg(cfg)
        cfg.merge_from_file(str(files("quest_graphgps") / "configs" / "pattern.yaml"))
        cfg.accelerator, cfg.num_workers, cfg.seed = device, 0, 0
        cfg.train.batch_size, cfg.gt.layers, cfg.gt.n_heads = sizes["batch"], sizes["layers"], sizes["heads"]
        cfg.gt.dim_hidden = cfg.gnn.dim_inner = sizes["width"]
        cfg.gt.attention = attention
        cfg.gt.dropout = cfg.gt.attn_dropout = 0.0
        cfg.optim.num_warmup_epochs, cfg.optim.max_epoch = 0, 1 + steps * sizes["batch"] // sizes["graphs"]
        cfg.dataset.format, cfg.dataset.name = "memory", "PATTERN"
        gps.MEMORY["PATTERN"] = GENERATORS["PATTERN"]((sizes["graphs"], 4, 4), 0)
        pl.seed_everything(0, verbose=False)
        data, model, watch = GraphGymDataModule(), create_model(), Watch(device)
        if compiled:
            torch.compiler.reset()
            model.model.compile(backend=compiler(device), dynamic=True)  # every batch has another size
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            precision=PRECISIONS[precision],
            callbacks=[watch],
            default_root_dir=tempfile.gettempdir(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
        trainer.fit(model, datamodule=data)
        return watch.seen
