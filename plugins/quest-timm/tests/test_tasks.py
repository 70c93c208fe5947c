"""The benchmark suite: the results of a cell, and data that follow from the seed."""

from __future__ import annotations

import torch

from devtools.cells import HostSuites, check_resume
from quest_suites.contract import Cell
from quest_suites.timm.suites import SUITES
from quest_suites.timm.tasks import make_batch, run_strokes

SUITE = SUITES["vision/strokes"]
OPTIONS = {option["name"]: option["default"] for option in SUITE["options"]}


def test_a_smoke_run_returns_the_metric(tmp_path):
    seen = []
    cell = Cell("vision/strokes", "strokes", "quest", 0, True, None, OPTIONS, tmp_path)
    result = run_strokes(cell, lambda share, text: seen.append(share))
    assert 0 <= result.metrics["accuracy"] <= 100
    assert seen[-1] == 1
    assert "attention=quest in 4 modules" in result.details["injected"]


def test_batches_are_those_of_the_seed():
    one, other = (make_batch(8, 7, torch.Generator().manual_seed(3)) for _ in range(2))
    torch.testing.assert_close(one, other)
    assert one[0].shape == (8, 3, 32, 32)


def test_a_stopped_cell_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("quest_suites.contract.SAVE_STEPS", 2)
    check_resume(
        run_strokes, Cell("vision/strokes", "strokes", "quest", 0, True, None, OPTIONS, tmp_path), tmp_path, 0.5
    )


class TestSuites(HostSuites):
    declared = SUITES
    committed = ("time/timm",)
    places = ("docs",)
