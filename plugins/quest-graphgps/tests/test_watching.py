"""gnn.watch_attention: what GraphGym's own logger writes into its own stats.json."""

import json

import pytest
from models import configure, graph, trainer
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.logger import LoggerCallback
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.loader import DataLoader

from devtools.logits import clipped, recorded
from quest_core.errors import ConfigError
from quest_graphgps import watching


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_stats_hold_the_largest_logit_and_the_entropy(tmp_path, monkeypatch, attention):
    monkeypatch.chdir(tmp_path)
    configure()
    cfg.merge_from_list(["gt.attention", attention, "gnn.watch_attention", 2])
    cfg.run_dir, cfg.share.num_splits, cfg.params = str(tmp_path), 1, 0
    try:
        model = create_model(dim_in=3, dim_out=2)
        run = trainer(max_epochs=2, callbacks=[LoggerCallback()], default_root_dir=tmp_path)
        with recorded() as calls:
            run.fit(model, DataLoader([graph(n, None) for n in (5, 7, 4, 6)], batch_size=2))
        steps = [step for step, _ in watching._current[0].history]
    finally:
        watching._current.clear()
    assert steps == [1, 2, 4]
    lines = [json.loads(line) for line in (tmp_path / "train" / "stats.json").read_text().splitlines()]
    assert len(lines) == 2
    layers = len(calls) // 4
    tops = [max(top for top, _ in calls[layers * step : layers * (step + 1)]) for step in range(4)]
    # The mean of the latest measurement over an epoch's nodes, 12 and 10 in its two batches; step 3 is not measured.
    wanted = [(12 * tops[0] + 10 * tops[1]) / 22, (12 * tops[1] + 10 * tops[3]) / 22]
    assert [line["max_logit"] for line in lines] == pytest.approx(wanted, abs=1e-3)
    assert all(line["entropy"] > 0 for line in lines)


def test_queries_are_clipped_after_every_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configure()
    cfg.merge_from_list(["gnn.qk_clip", 1])
    cfg.run_dir, cfg.share.num_splits, cfg.params = str(tmp_path), 1, 0
    run = trainer(max_epochs=1, callbacks=[LoggerCallback()], default_root_dir=tmp_path)
    try:
        with clipped() as factors:
            run.fit(create_model(dim_in=3, dim_out=2), DataLoader([graph(n, None) for n in (5, 7, 4)]))
    finally:
        watching._current.clear()
    assert len(factors) == 3


@pytest.mark.parametrize("key", watching.KEYS)
@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_a_wrong_key_is_an_error(key, value):
    configure()
    cfg.gnn[key] = value
    with pytest.raises(ConfigError, match=f"gnn.{key} is"):
        watching.read(cfg)
