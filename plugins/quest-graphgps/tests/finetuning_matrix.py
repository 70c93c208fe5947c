"""Run in a checkout of GraphGPS: python finetuning_matrix.py save|load FOLDER NAME ...

"save" writes a run of every named model. "load" starts each named model from all runs in the folder, as main.py does
with pretrained.dir, and prints a line of JSON: [[checkpoint, model, outcome], ...]. If only "stock" is named, the
plugin is not installed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from checkpoint_models import MODELS, outcome

sys.path.insert(0, os.getcwd())  # GraphGPS, which is run from its checkout

if sys.argv[3:] != ["stock"]:
    import quest_graphgps  # noqa: F401

import graphgps  # noqa: F401
import torch
from graphgps.finetuning import init_model_from_pretrained
from torch_geometric.graphgym.checkpoint import save_ckpt
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model

action, folder, *names = sys.argv[1:]


def build(name: str) -> torch.nn.Module:
    set_cfg(cfg)
    cfg.merge_from_file("configs/GPS/zinc-GPS+RWSE.yaml")
    cfg.merge_from_list(["gt.layers", 2, "accelerator", "cpu", "seed", 0])
    if name != "stock":
        cfg.merge_from_list(["gt.attention", MODELS[name]])
    return create_model(dim_in=1, dim_out=1)


if action == "save":
    for name in names:
        model = build(name)
        cfg.run_dir = str(Path(folder, name, "0"))
        save_ckpt(model)
else:
    found = []
    for checkpoint in MODELS:
        for name in names:
            model = build(name)
            what = outcome(lambda: init_model_from_pretrained(model, str(Path(folder, checkpoint))))  # noqa: B023
            found.append([checkpoint, name, what])
    print(json.dumps(found))
