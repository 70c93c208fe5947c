"""The suite transformers/bytes-lm, shortened."""

from __future__ import annotations

import math

import pytest
from models import CONFIGS

from devtools.cells import HostSuites, check_resume
from quest_suites.contract import Cell
from quest_suites.transformers.suites import SUITES
from quest_suites.transformers.tasks import run_bytes_lm

SUITE = SUITES["transformers/bytes-lm"]
DEFAULTS = {option["name"]: option["default"] for option in SUITE["options"]}


@pytest.mark.parametrize("task", SUITE["tasks"])
def test_a_stopped_cell_continues(task, tmp_path, monkeypatch):
    monkeypatch.setattr("quest_suites.contract.SAVE_STEPS", 1)
    cell = Cell("transformers/bytes-lm", task, "quest", 0, True, None, {**DEFAULTS, "width": 16}, tmp_path)
    found = check_resume(run_bytes_lm, cell, tmp_path, 0.3)
    assert math.isfinite(found.metrics["perplexity"])
    assert found.details["injected"].startswith("attention=quest in 4 modules")


class TestSuites(HostSuites):
    declared = SUITES
    committed = ("transformers/bytes-lm", *(["time/transformers"] if "t5" in CONFIGS else []))  # which times T5
    places = ("plugins/quest-transformers", "research/results")
