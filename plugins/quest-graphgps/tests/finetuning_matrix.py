"""Run in a checkout of GraphGPS: python finetuning_matrix.py FOLDER

Writes runs into FOLDER, starts models from them as main.py does with pretrained.dir, and compares with the table.
"""

import os
import sys
from pathlib import Path

import quest_graphgps  # noqa: F401  # first, as `quest run` has it: it changes what GraphGPS imports from itself

sys.path.insert(0, os.getcwd())  # GraphGPS, which is run from its checkout

import graphgps  # noqa: F401
import torch
from graphgps.finetuning import init_model_from_pretrained
from torch_geometric.graphgym.checkpoint import save_ckpt
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model

from devtools import matrix

FOLDER = sys.argv[1]


def build(name: str) -> torch.nn.Module:
    set_cfg(cfg)
    cfg.merge_from_file("configs/GPS/zinc-GPS+RWSE.yaml")
    cfg.merge_from_list(["gt.layers", 2, "accelerator", "cpu", "seed", 0])
    if name != "stock":
        cfg.merge_from_list(["gt.attention", name])
    return create_model(dim_in=1, dim_out=1)


for name in ("stock", "quest"):
    saved = build(name)
    cfg.run_dir = str(Path(FOLDER, name, "0"))
    save_ckpt(saved)


def load(checkpoint: str, model: str) -> None:
    init_model_from_pretrained(build(model), str(Path(FOLDER, checkpoint)))


matrix.check_loader(load, "GraphGPS", "`pretrained.dir`", named=False)
