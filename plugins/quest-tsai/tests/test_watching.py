"""WatchAttention: what a Learner of tsai shows, through fastai's own table."""

import csv

import numpy as np
import pytest
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.tracker import CSVLogger
from fastai.learner import load_learner
from tsai.basics import TSClassifier

from devtools.logits import check, clipped, recorded, scalars
from quest_tsai.watching import WatchAttention


def learner(tmp_path, attention, *callbacks):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 2, 12)).astype("float32"), np.arange(24) % 2
    splits = (list(range(16)), list(range(16, 24)))
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1} | ({"attention": attention} if attention else {})
    return TSClassifier(
        x, y, splits=splits, arch="TSTPlus", arch_config=sizes, cbs=[*callbacks], bs=8, path=tmp_path, device="cpu"
    )


@pytest.mark.parametrize("attention", [None, "quest"])
def test_every_log_of_fastai_has_every_layer_and_the_table_the_totals(tmp_path, attention, capsys):
    watch, board = WatchAttention(every=1), TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learn = learner(tmp_path, attention, watch, CSVLogger(tmp_path / "log.csv"), board)
    names = [metric.name for metric in learn.metrics]
    kinds = [type(module) for module in learn.model.modules()]
    with recorded() as calls:
        learn.fit(2)
    curves = scalars(tmp_path)
    for epoch, row in enumerate(csv.DictReader((tmp_path / "log.csv").open())):
        values = {name: float(value) for name, value in row.items() if name.startswith("attention/")}
        check(values, [calls[2 * epoch + 1]], rel=1e-4)  # the second of an epoch's two batches
        assert values == pytest.approx({name: curves[2 * epoch + 2][name] for name in values})
    shown = capsys.readouterr().out
    assert "attention/max_logit" in shown
    assert "attention/backbone" not in shown
    assert [metric.name for metric in learn.metrics] == names
    assert [type(module) for module in learn.model.modules()] == kinds
    assert len(watch.watch.history) == 4  # two batches in each of two epochs


def test_queries_are_clipped_after_every_batch(tmp_path):
    learn = learner(tmp_path, None, WatchAttention(clip=1e-6))
    with learn.no_bar(), clipped() as factors:
        learn.fit(1)
    assert len(factors) == 2
    learn.export(tmp_path / "learner.pkl")
    again = load_learner(tmp_path / "learner.pkl")
    again.dls = learn.dls
    with again.no_bar():
        again.fit(1)
    assert again.watch_attention.watch.steps == 2
    assert factors[0]  # RAdam begins with small steps, after which the second batch may stay below
