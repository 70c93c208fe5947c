"""WatchAttention: what a Learner of tsai shows, through fastai's own table."""

import csv

import pytest
from conftest import classifier
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.tracker import CSVLogger
from fastai.learner import load_learner

from devtools.logits import check, clipped, recorded, scalars
from quest_tsai.watching import WatchAttention


@pytest.mark.parametrize("attention", [None, "quest"])
def test_every_log_of_fastai_has_every_layer_and_the_table_the_totals(tmp_path, attention, capsys):
    watch, board = WatchAttention(every=1), TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learn = classifier(tmp_path, attention, cbs=[watch, CSVLogger(tmp_path / "log.csv"), board])
    names = [metric.name for metric in learn.metrics]
    kinds = [type(module) for module in learn.model.modules()]
    with recorded() as calls:
        learn.fit(2)
    curves = scalars(tmp_path)
    for epoch, row in enumerate(csv.DictReader((tmp_path / "log.csv").open())):
        values = {name: float(value) for name, value in row.items() if name.startswith("attention/")}
        check(values, calls[4 * epoch + 2 : 4 * epoch + 4], rel=1e-4)  # two layers in the second of two batches
        assert values == pytest.approx({name: curves[2 * epoch + 2][name] for name in values})
    shown = capsys.readouterr().out
    assert "attention/max_logit" in shown
    assert "attention/backbone" not in shown
    assert [metric.name for metric in learn.metrics] == names
    assert [type(module) for module in learn.model.modules()] == kinds
    assert len(watch.watch.history) == 4  # two batches in each of two epochs


def test_queries_are_clipped_after_every_batch(tmp_path):
    learn = classifier(tmp_path, cbs=[WatchAttention(clip=1e-6)])
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
