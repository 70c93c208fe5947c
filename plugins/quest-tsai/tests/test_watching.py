"""WatchAttention: what a Learner of tsai shows, through fastai's own table."""

import numpy as np
import pytest
from fastai.callback.tracker import CSVLogger
from tsai.basics import TSClassifier

from devtools.logits import clipped, recorded
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
def test_the_table_of_epochs_shows_logits(tmp_path, attention):
    watch = WatchAttention(every=1)
    learn = learner(tmp_path, attention, watch, CSVLogger(tmp_path / "log.csv"))
    kinds = [type(module) for module in learn.model.modules()]
    with learn.no_bar(), recorded() as calls:
        learn.fit(2)
    table = (tmp_path / "log.csv").read_text().splitlines()
    names = table[0].split(",")
    assert {"max_logit", "entropy"} <= {*names}
    for row, call in zip(table[1:], calls[1::2], strict=True):  # the second of an epoch's two batches
        shown = [float(row.split(",")[names.index(name)]) for name in ("max_logit", "entropy")]
        assert shown == pytest.approx(call, rel=1e-4)
    assert [type(module) for module in learn.model.modules()] == kinds
    assert len(watch.watch.history) == 4  # two batches in each of two epochs


def test_queries_are_clipped_after_every_batch(tmp_path):
    learn = learner(tmp_path, None, WatchAttention(clip=1e-6))
    with learn.no_bar(), clipped() as factors:
        learn.fit(1)
    assert len(factors) == 2
    assert factors[0]  # RAdam begins with small steps, after which the second batch may stay below
