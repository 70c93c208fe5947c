"""What quest_suites.contract gives to suites: states that survive a kill, a framework's own trainer, paired times."""

import math
import random
import resource
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import quest_suites
from quest_bench.worker import describe_error
from quest_core.errors import PluginError
from quest_suites.contract import (
    STATE,
    Cell,
    Trained,
    at_best_rate,
    load_state,
    over_rates,
    own_trainer,
    save_state,
    sweep,
    width_of_range,
)
from quest_suites.timing import peak_mib, time_in_turns, training_step


@pytest.fixture
def cell(tmp_path):
    return Cell("a/b", "task", "quest", 0, False, None, {"epochs": 3}, tmp_path)


def test_a_state_comes_back_with_the_random_generators(cell):
    assert load_state(cell) is None
    save_state(cell, {"losses": [1.0], "weights": torch.ones(2)})
    drawn = random.random(), torch.rand(1)
    state = load_state(cell)
    assert (state["losses"], state["weights"].tolist()) == ([1.0], [1.0, 1.0])
    assert (random.random(), torch.rand(1)) == drawn
    assert [path.name for path in cell.workdir.iterdir()] == [STATE]


def test_a_state_that_cannot_be_written_keeps_the_one_before(cell):
    save_state(cell, {"losses": [1.0]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))  # stands for a full disk
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_state(cell, {"weights": torch.ones(1 << 17)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert describe_error(caught.value) == "OSError: File too large"
    assert load_state(cell) == {"losses": [1.0]}
    assert len([*cell.workdir.iterdir()]) == 1


def test_every_suite_declares_how_the_reported_epoch_is_selected():
    for path in Path(quest_suites.__file__).parent.glob("*/suites.py"):
        for name, facts in runpy.run_path(str(path))["SUITES"].items():
            assert "selection" in facts or "select" in [option["name"] for option in facts["options"]], name


@pytest.mark.parametrize("change", [{"attention": "standard"}, {"seed": 1}, {"options": {"epochs": 4}}])
def test_the_state_of_another_cell_is_left_alone(cell, change):
    save_state(cell, {})
    assert load_state(replace(cell, **change)) is None


@pytest.mark.parametrize("left", [0, 10, -10])
def test_a_torn_state_starts_the_cell_again(cell, capsys, left):
    save_state(cell, {"losses": [1.0]})
    path = cell.workdir / STATE
    path.write_bytes(path.read_bytes()[:left])
    assert load_state(cell) is None
    assert f"{path} cannot be read" in capsys.readouterr().out


def test_a_trainer_is_read_line_by_line(tmp_path, capfd):
    code = "import os; print('a'); print(os.environ['WORD'], os.getcwd())"
    lines = list(own_trainer("it", [sys.executable, "-c", code], folder=tmp_path, environment={"WORD": "b"}))
    assert lines == ["a\n", f"b {tmp_path}\n"]
    assert capfd.readouterr().out == "".join(lines)
    with pytest.raises(PluginError, match="it ended with status 3: it printed nothing; log.txt has the rest"):
        list(own_trainer("it", [sys.executable, "-c", "raise SystemExit(3)"], folder=tmp_path))


def test_a_trainer_ends_with_its_reader(tmp_path):
    lines = own_trainer("it", [sys.executable, "-c", "import time; print(1); time.sleep(600)"], folder=tmp_path)
    started = time.monotonic()
    assert next(lines) == "1\n"
    lines.close()
    assert time.monotonic() - started < 60


def test_steps_take_turns():
    reported = []
    calls = []

    def step(name, count):
        calls.append(name)
        sum(range(count))

    def progress(fraction, text):
        reported.append(fraction)

    found = time_in_turns(lambda: step("stock", 300_000), lambda: step("own", 900_000), rounds=5, progress=progress)
    assert found.metrics["time of stock"] == pytest.approx(3, rel=0.5)
    assert found.metrics["seconds"] > found.metrics["stock seconds"] > 0
    assert len(found.series["ratio"]) == 5
    if not torch.cuda.is_available():
        assert "memory of stock" not in found.metrics  # a ratio of nothing; as NaN it would be a failed seed
    assert (calls.count("own"), calls.count("stock"), reported[-1]) == (7, 7, 1)  # memory is measured in a fork


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is its allocator's")
def test_memory_is_the_rise_of_the_peak():
    """Code that the process maps, modules that a first call imports and free memory of the heap change nothing."""
    layer, x, kept = nn.Linear(64, 64), torch.randn(2**10, 64), []
    step = training_step(layer, lambda: kept.append(torch.ones(2**22)) or layer(x).square().mean())
    free = [torch.ones(2**10) for _ in range(2**13)]
    del free[::2]
    assert peak_mib(step) == pytest.approx(16, abs=2)
    assert not kept  # it is the child that kept them
    assert peak_mib(lambda: None) == pytest.approx(0, abs=0.1)


def test_a_rate_that_diverges_stays_among_the_rates():
    found = {
        0.1: Trained(70.0, 60.0, {"train_loss": [2.0, 1.0]}),
        1.0: Trained(69.5, 61.0, {"train_loss": [2.5]}),
        10.0: Trained(10.0, 10.0, {"train_loss": []}, diverged=True),
    }
    shares = []

    def train(rate, name, progress):
        progress(0.5, name)
        return {**found, 0.1 * 10**0.5: found[0.1], 10**0.5: found[1.0]}[rate]

    result = over_rates(sweep(0.1, 5, train, lambda share, text: shares.append(share)))
    assert shares == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert result.metrics == {
        "accuracy": pytest.approx((70 + 70 + 69.5 + 69.5 + 10) / 5),
        "accuracy/lr=0.1": 70.0,
        "accuracy/lr=0.32": 70.0,
        "accuracy/lr=1": 69.5,
        "accuracy/lr=3.2": 69.5,
        "accuracy/lr=10": 10.0,
        "best accuracy": 69.5,  # that of the best validation, not the best one
        "range": 2.0,
        "diverged": 1.0,
    }
    assert result.series["train_loss/lr=1"] == [2.5]
    assert result.details["diverged"] == ["lr=10"]


@pytest.mark.parametrize(
    ("scores", "decades"),
    [
        ([70, 69.5, 69.2, 40], 1.5),
        ([50, 70, 60, 69.9], 0.5),
        ([10, 69, 70], 1.0),
        ([10, 10], 1.0),
        ([70, 60, 70, 70], 1.0),
        ([50, -math.inf], 0.5),
        ([-math.inf, -math.inf], 0.0),
    ],
)
def test_the_range_is_of_neighbors_within_a_point(scores, decades):
    assert width_of_range(scores) == decades


def test_a_rate_that_diverged_is_not_the_best():
    fine, lost = Trained(49.2, 49.4, {}), Trained(50.0, 50.0, {}, diverged=True)
    for first, second in ((fine, lost), (lost, fine)):
        found = over_rates({"lr=1": first, "lr=3": second}).metrics
        assert (found["best accuracy"], found["range"]) == (49.2, 0.5)
    found = over_rates({"lr=1": lost}).metrics
    assert math.isnan(found["best accuracy"])
    assert math.isnan(at_best_rate({"lr=1": lost}).metrics["accuracy"])
