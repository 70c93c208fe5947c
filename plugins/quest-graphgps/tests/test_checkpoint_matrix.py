"""Every checkpoint, by every way that PyTorch Geometric, GraphGym and Lightning load one, into every model.

GraphGPS's own way has a table of its own, in test_real_graphgps.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_models import MODELS, outcome
from models import ConvModel, configure, graph
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch_geometric.graphgym import load_ckpt, save_ckpt
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import GraphGymModule, create_model
from torch_geometric.loader import DataLoader

from quest_core import AttentionMismatchWarning
from quest_core.testing.matrix import committed, table
from quest_graphgps import GraphGPSAdapter

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.fixture(autouse=True)
def _quiet_and_clean(caplog):
    caplog.set_level(logging.ERROR, "pytorch_lightning")
    yield
    set_cfg(cfg)


def conv(name: str) -> torch.nn.Module:
    """GPSConv with `attention` in its attn_kwargs."""
    attention = None if name == "stock" else MODELS[name]
    return ConvModel(0.0, attention=attention)


def gym(name: str, attention_from: str | None = None) -> GraphGymModule:
    configure()
    cfg.merge_from_list(["gt.attention", MODELS[name], "gt.attention_from", str(attention_from)])
    return create_model(dim_in=3, dim_out=2)


def trainer(*callbacks: EMAWeightAveraging) -> Trainer:
    return Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )


def batches() -> DataLoader:
    return DataLoader([graph(n, None) for n in (5, 6)], batch_size=2)


def save_by_graphgym(name: str, folder: Path) -> None:
    model = gym(name)
    cfg.run_dir = str(folder)
    save_ckpt(model, torch.optim.AdamW(model.parameters()), epoch=3)


def save_by_lightning(name: str, folder: Path, *callbacks: EMAWeightAveraging) -> None:
    run = trainer(*callbacks)
    run.fit(gym(name), batches())
    run.save_checkpoint(folder / "last.ckpt")


def save_average(name: str, folder: Path) -> None:
    save_by_lightning(name, folder, EMAWeightAveraging())


def resume(model: GraphGymModule, folder: Path) -> None:
    cfg.run_dir = str(folder)
    assert load_ckpt(model, torch.optim.AdamW(model.parameters())) == 4


def evaluate(model: GraphGymModule, folder: Path) -> None:
    cfg.run_dir = str(folder)
    assert load_ckpt(model) == 4


def fit(model: GraphGymModule, folder: Path) -> None:
    trainer().fit(model, batches(), ckpt_path=folder / "last.ckpt")


def fit_average(model: GraphGymModule, folder: Path) -> None:
    trainer(EMAWeightAveraging()).fit(model, batches(), ckpt_path=folder / "last.ckpt")


def test(model: GraphGymModule, folder: Path) -> None:
    trainer().test(model, batches(), ckpt_path=folder / "last.ckpt", verbose=False)


test.__test__ = False  # type: ignore[attr-defined]


def load_from_checkpoint(model: GraphGymModule, folder: Path) -> None:
    """It builds another model from the same config."""
    GraphGymModule.load_from_checkpoint(folder / "last.ckpt", dim_in=3, dim_out=1, cfg=cfg, weights_only=False)


DOORS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "GraphGym, `load_ckpt` with an optimizer": (save_by_graphgym, resume),
    "GraphGym, `load_ckpt`": (save_by_graphgym, evaluate),
    "Lightning, `fit(ckpt_path=…)`": (save_by_lightning, fit),
    "Lightning, `test(ckpt_path=…)`": (save_by_lightning, test),
    "Lightning, `load_from_checkpoint`": (save_by_lightning, load_from_checkpoint),
    "Lightning, `fit` with `EMAWeightAveraging`": (save_average, fit_average),
    "Lightning, `test` of the moving average": (save_average, test),
}
"""A way to load in the table -> how the checkpoint was saved, and how it is loaded."""


HUB = "`load_state_dict(strict=False)`, as in `PyGModelHubMixin`"


@pytest.mark.timeout(240)
def test_no_checkpoint_is_loaded_silently_into_another_attention(tmp_path) -> None:
    found: dict[tuple[str, str, str], str] = {}
    for checkpoint in MODELS:
        state = conv(checkpoint).state_dict()
        for name in MODELS:
            model = conv(name)
            found["`load_state_dict`", checkpoint, name] = outcome(lambda: model.load_state_dict(state))  # noqa: B023
    for checkpoint in MODELS:
        state = conv(checkpoint).state_dict()
        for name in MODELS:
            found[HUB, checkpoint, name] = outcome(lambda: conv(name).load_state_dict(state, strict=False))  # noqa: B023
    for door, (save, load) in DOORS.items():
        for checkpoint in MODELS:
            folder = tmp_path / f"{save.__name__} {checkpoint}"
            if not folder.exists():
                folder.mkdir()
                save(checkpoint, folder)
            for name in MODELS:
                model = gym(name)
                found[door, checkpoint, name] = outcome(lambda: load(model, folder))  # noqa: B023
    plain = {"stock", "standard"}
    for (door, checkpoint, name), what in found.items():
        same = checkpoint == name or {checkpoint, name} <= plain
        assert (what == "loads") == same, (door, checkpoint, name, what)
    assert table(found) == committed(PAGE, "checkpoints-graphgps")


@pytest.mark.parametrize("name", ["quest", "gqa", "sigmoid"])
@pytest.mark.parametrize("door", list(DOORS))
def test_attention_from_accepts_what_it_names(door, name, tmp_path) -> None:
    save, load = DOORS[door]
    save("standard", tmp_path)
    model = gym(name, attention_from="standard")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionMismatchWarning)
        load(model, tmp_path)


@pytest.mark.parametrize("attention", ["qknorm-hs", "qknorm+dgqa(kv_heads=2)", "quest+pgqa(kv_heads=2)"])
def test_learnable_and_stateful_mechanisms_resume_from_a_moving_average(attention, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(MODELS, "own", attention)
    save_average("own", tmp_path)
    fit_average(gym("own"), tmp_path)


def test_what_an_uninstalled_plugin_leaves_refuses_a_checkpoint(tmp_path) -> None:
    save_by_graphgym("quest", tmp_path)
    adapter = GraphGPSAdapter()
    try:
        adapter.uninstall()
        configure()
        assert outcome(lambda: evaluate(create_model(dim_in=3, dim_out=2), tmp_path)) == "unexpected"
    finally:
        adapter.install()
