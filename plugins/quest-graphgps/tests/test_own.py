"""GraphGPS's own trainer as a suite; a stand-in for main.py writes what GraphGym writes."""

import json

import pytest

from quest_suites.contract import Cell
from quest_suites.graphgps.own import run_own, tasks

MAIN = """
import json, pathlib, sys
words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
folder = pathlib.Path(given["out_dir"]) / "small" / given["seed"]
for split, mae in {"train": [3, 2, 1], "val": [2.0, 1.0, 1.5], "test": [2.5, 1.25, 0.5]}.items():
    (folder / split).mkdir(parents=True)
    lines = [{"epoch": i, "loss": m, "mae": m, "time_epoch": 0.5} for i, m in enumerate(mae)]
    lines.insert(2, {"epoch": 1, "loss": 9.0, "mae": 9.0, "time_epoch": 0.5}) if split == "train" else None
    (folder / split / "stats.json").write_text("\\n".join(map(json.dumps, lines)))
    print(f"{split}: {lines[-1]}")
pathlib.Path(given["out_dir"], "words.json").write_text(json.dumps(words))
"""


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "GraphGPS"
    (folder / "configs" / "GPS").mkdir(parents=True)
    (folder / "main.py").write_text(MAIN)
    configs = {
        "small": "metric_best: mae\nmetric_agg: argmin\nmodel: {type: GPSModel}\noptim: {max_epoch: 3}\n",
        "auto": "model: {type: GPSModel}\n",
        "gcn": "metric_best: mae\nmodel: {type: gnn}\n",
        "torn": "a: [",
    }
    for name, text in configs.items():
        (folder / "configs" / "GPS" / f"{name}.yaml").write_text(text)
    return folder


def test_the_configs_of_a_checkout_are_listed_and_checked(repo):
    found = tasks(repo)
    small = found.pop("configs/GPS/small.yaml")
    assert (small["metric"], small["higher_is_better"], small["problem"]) == ("mae", False, None)
    assert str(repo / "main.py") in small["files"]
    assert "does not name its metric" in found["configs/GPS/auto.yaml"]["problem"]
    assert "has no attention" in found["configs/GPS/gcn.yaml"]["problem"]
    assert "cannot be read as a config" in found["configs/GPS/torn.yaml"]["problem"]


def test_the_test_metric_of_the_best_validation_epoch_is_read(repo, tmp_path):
    reported = []
    work = tmp_path / "work"
    work.mkdir()
    given = Cell("graphgps", "configs/GPS/small.yaml", "quest", 7, False, repo, {"set": "gt.dropout 0.1"}, work)
    done = run_own(given, lambda *what: reported.append(what))
    assert (done.metrics["mae"], done.metrics["epochs"], done.details["reported_epoch"]) == (1.25, 3, 1)
    assert done.series["train_mae"] == [3, 9.0, 1]
    assert reported[-1][0] == 1.0
    words = json.loads((work / "results" / "words.json").read_text())
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert (given["gt.attention"], given["seed"], given["gt.dropout"]) == ("quest", "7", "0.1")
    assert given["train.auto_resume"] == "True"
