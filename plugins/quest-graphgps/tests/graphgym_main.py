"""A main of GraphGym, which PyTorch Geometric's wheel does not bring, with GraphGPS's model."""

import torch
from pytorch_lightning import seed_everything
from torch_geometric.graphgym.cmd_args import parse_args
from torch_geometric.graphgym.config import cfg, dump_cfg, load_cfg, set_cfg, set_out_dir, set_run_dir
from torch_geometric.graphgym.logger import set_printing
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.graphgym.train import GraphGymDataModule, train
from torch_geometric.graphgym.utils.comp_budget import params_count
from torch_geometric.graphgym.utils.device import auto_select_device

import quest_suites.graphgps.gps  # noqa: F401  # GraphGPS's model in GraphGym; in GraphGPS itself nothing is imported

if __name__ == "__main__":
    arguments = parse_args()
    set_cfg(cfg)
    load_cfg(cfg, arguments)
    set_out_dir(cfg.out_dir, arguments.cfg_file)
    dump_cfg(cfg)
    torch.set_num_threads(cfg.num_threads)
    set_run_dir(cfg.out_dir)
    set_printing()
    seed_everything(cfg.seed)
    auto_select_device()
    data = GraphGymDataModule()
    model = create_model()
    cfg.params = params_count(model)
    clip = cfg.optim.clip_grad_norm_value if cfg.optim.clip_grad_norm else None
    train(model, data, trainer_config={"gradient_clip_val": clip, "enable_progress_bar": False})
