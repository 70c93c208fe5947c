"""Load checkpoints of another attention by every loader of PyTorch Geometric, GraphGym and Lightning.

The table is in docs/checkpoints.md. The loader of GraphGPS is tested in test_real_graphgps.py.
"""

import functools
import logging

import pytest
import torch
from models import ConvModel, configure, graph, trainer
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch_geometric.graphgym import load_ckpt, save_ckpt
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import GraphGymModule, create_model
from torch_geometric.loader import DataLoader

from devtools import matrix


@pytest.fixture(autouse=True)
def _quiet_and_clean(caplog):
    caplog.set_level(logging.ERROR, "pytorch_lightning")
    yield
    set_cfg(cfg)


def gym(name, attention_from=None):
    configure()
    cfg.merge_from_list(["gt.attention", "None" if name == "stock" else name, "gt.attention_from", str(attention_from)])
    return create_model(dim_in=3, dim_out=2)


def batches():
    return DataLoader([graph(n, None) for n in (5, 6)], batch_size=2)


def save_by_graphgym(name, folder):
    model = gym(name)
    cfg.run_dir = str(folder)
    save_ckpt(model, torch.optim.AdamW(model.parameters()), epoch=3)


def fit(model, folder=None, average=False):
    run = trainer(max_epochs=1, limit_val_batches=0, callbacks=[EMAWeightAveraging()] * average)
    run.fit(model, batches(), ckpt_path=folder and folder / "last.ckpt")
    return run


def save_by_lightning(name, folder, average=False):
    fit(gym(name), average=average).save_checkpoint(folder / "last.ckpt")


def load_by_graphgym(model, folder, resume):
    cfg.run_dir = str(folder)
    assert load_ckpt(model, torch.optim.AdamW(model.parameters()) if resume else None) == 4


def evaluate_by_lightning(model, folder):
    trainer().test(model, batches(), ckpt_path=folder / "last.ckpt", verbose=False)


def load_from_checkpoint(model, folder):
    """It builds another model from the same config."""
    GraphGymModule.load_from_checkpoint(folder / "last.ckpt", dim_in=3, dim_out=1, cfg=cfg, weights_only=False)


save_average = functools.partial(save_by_lightning, average=True)
GYM = {
    "GraphGym `load_ckpt` with an optimizer": (save_by_graphgym, functools.partial(load_by_graphgym, resume=True)),
    "GraphGym `load_ckpt`": (save_by_graphgym, functools.partial(load_by_graphgym, resume=False)),
    "Lightning `fit(ckpt_path=)`": (save_by_lightning, fit),
    "Lightning `test(ckpt_path=)`": (save_by_lightning, evaluate_by_lightning),
    "Lightning `load_from_checkpoint`": (save_by_lightning, load_from_checkpoint),
    "Lightning `fit` with `EMAWeightAveraging`": (save_average, functools.partial(fit, average=True)),
    "Lightning `test` with `EMAWeightAveraging`": (save_average, evaluate_by_lightning),
}
"""A loader in the table -> how the checkpoint was saved, and how it is loaded."""


def plain(checkpoint, model, strict=True):
    source, target = (ConvModel(0.0, attention=None if name == "stock" else name) for name in (checkpoint, model))
    target.load_state_dict(source.state_dict(), strict=strict)


PLAIN = {
    "`load_state_dict`": plain,
    "`load_state_dict(strict=False)`, `PyGModelHubMixin`": functools.partial(plain, strict=False),
}
LOADERS = {*PLAIN, *GYM, "`pretrained.dir`"}


@pytest.mark.parametrize("loader", PLAIN)
def test_a_state_dict_of_another_attention(loader):
    matrix.check_loader(PLAIN[loader], "GraphGPS", loader, among=LOADERS, named=False)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loader", GYM)
def test_a_checkpoint_of_another_attention(loader, tmp_path):
    save, load = GYM[loader]

    def run(checkpoint, model, attention_from=None):
        written = tmp_path / checkpoint
        if not written.exists():
            written.mkdir()
            save(checkpoint, written)
        load(gym(model, attention_from), written)

    matrix.check_loader(run, "GraphGPS", loader, among=LOADERS)
