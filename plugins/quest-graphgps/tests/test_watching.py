"""gnn.watch_attention: what GraphGym's own logger writes into its own stats.json."""

import importlib
import json
import sys

import pytest
import torch
from models import configure, graph, trainer
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.logger import LoggerCallback
from torch_geometric.graphgym.loss import compute_loss
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.loader import DataLoader

from devtools.logits import check, clipped, recorded, scalars
from quest_core.errors import ConfigError
from quest_core.hosts.patching import Patches
from quest_graphgps import watching

LOGGER = """
from torch_geometric.graphgym.logger import Logger

class CustomLogger(Logger):
    def update_stats(self, true, pred, loss, lr, time_used, params, dataset_name=None, **stats):
        self._iter, self._size_current = self._iter + 1, self._size_current + len(true)
        self._loss += loss * len(true)
        self._true.append(true), self._pred.append(pred)
        for key, value in stats.items():
            self._custom_stats[key] = self._custom_stats.get(key, 0) + value * len(true)
"""
"""A stand-in for GraphGPS's own logger, which test_real_graphgps.py reads; no package index has GraphGPS."""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The stand-in where Python finds GraphGPS's logger."""
    (tmp_path / "graphgps").mkdir()
    (tmp_path / "graphgps" / "__init__.py").touch()
    (tmp_path / "graphgps" / "logger.py").write_text(LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    patches = Patches()
    watching.install(patches)
    yield importlib.import_module("graphgps.logger").CustomLogger
    patches.undo()
    for name in ("graphgps.logger", "graphgps"):
        sys.modules.pop(name)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """built(key, value, ...) returns the model of a small config, whose run is logged in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def build(*options):
        configure()
        cfg.merge_from_list(["tensorboard_each_run", True, *options])
        cfg.run_dir, cfg.share.num_splits, cfg.params = str(tmp_path), 1, 0
        return create_model(dim_in=3, dim_out=2)

    yield build
    watching._current.clear()


def epochs(folder):
    """Return what GraphGym logged of each epoch of training, which TensorBoard must have too."""
    lines = [json.loads(line) for line in (folder / "train" / "stats.json").read_text().splitlines()]
    curves = scalars(folder / "train")
    for line in lines:
        wanted = pytest.approx(curves[line["epoch"]], rel=1e-5, nan_ok=True)  # a split of one class has no AUC
        assert {key: line[key] for key in curves[line["epoch"]]} == wanted
    return lines


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_graphgym_logs_what_attention_does(tmp_path, built, attention):
    """And clips the queries after every batch."""
    model = built("gt.attention", attention, "gnn.watch_attention", 2, "gnn.qk_clip", 1)
    run = trainer(max_epochs=3, callbacks=[LoggerCallback()], default_root_dir=tmp_path)
    with recorded() as calls, clipped() as factors:
        run.fit(model, DataLoader([graph(n, None) for n in (5, 7)], batch_size=2))
    assert len(factors) == 3
    layers = len(calls) // 3
    for line, step in zip(epochs(tmp_path), (0, 1, 1), strict=True):  # the third is not measured
        check(line, calls[layers * step : layers * (step + 1)], abs=1e-4)


def test_graphgps_logs_what_attention_does(tmp_path, built, stand_in):
    model = built("gnn.watch_attention", 1)
    logger = stand_in("train", "classification_binary")
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), next(iter(DataLoader([graph(5, None)])))
    for epoch in range(2):
        with recorded() as calls:
            pred, true = model(batch.clone())
            loss, score = compute_loss(pred, true)
            loss.backward()
        optimizer.step()
        logger.update_stats(true, score.detach(), loss.item(), 0.1, 0.0, 0, dataset_name="PATTERN")
        logger.write_epoch(epoch)
        logger.tb_writer.flush()
        check(epochs(tmp_path)[epoch], calls, abs=1e-4)


@pytest.mark.parametrize("key", watching.KEYS)
@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_a_wrong_key_is_an_error(key, value):
    configure()
    cfg.gnn[key] = value
    with pytest.raises(ConfigError, match=f"gnn.{key} is .*; expected a whole number, 0 for no"):
        watching.read(cfg)
