"""forecast/ett with the clones in QUEST_TSL_ROOT."""

import os
from pathlib import Path

import pytest

from devtools.cells import smoke_cell
from quest_suites.tsai import forecasting
from quest_suites.tsai.forecasting import run_ett, tasks
from quest_suites.tsai.suites import SUITES

if "QUEST_TSL_ROOT" not in os.environ:
    pytest.skip(
        "needs a checkout of thuml/Time-Series-Library and of zhouhaoyi/ETDataset; name their folder in QUEST_TSL_ROOT",
        allow_module_level=True,
    )
ROOT = Path(os.environ["QUEST_TSL_ROOT"]).resolve()
OPTIONS = {option["name"]: option for option in SUITES["forecast/ett"]["options"]}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", OPTIONS["model"]["choices"])
def test_standard_trains_as_the_library_does_and_the_clones_stay_as_they_were(tmp_path, monkeypatch, model):
    assert {name: one["problem"] for name, one in tasks(ROOT).items()} == {"ETTh1": None, "ETTh2": None}

    def run(attention):
        return run_ett(smoke_cell(SUITES, tmp_path, "forecast/ett", attention, data=ROOT, model=model), print)

    clones = [ROOT / "Time-Series-Library", ROOT / "ETDataset"]
    before = [set(clone.rglob("*")) for clone in clones]
    standard, quest = run("standard"), run("quest")
    assert [set(clone.rglob("*")) for clone in clones] == before
    assert quest.series != standard.series
    assert quest.details["parameters"] == standard.details["parameters"]

    monkeypatch.setattr(forecasting, "inject", lambda model, *_, **__: setattr(model, "attention_report", ""))
    monkeypatch.setattr(forecasting, "observe", lambda *_: {"max_logit": 0.0, "entropy": 0.0})
    own = run("standard")
    assert standard.series == {name: pytest.approx(values, rel=1e-5) for name, values in own.series.items()}
    assert [standard.metrics[name] for name in ("mse", "mae")] == pytest.approx(
        [own.metrics[name] for name in ("mse", "mae")], rel=1e-5
    )
