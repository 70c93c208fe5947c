"""The benchmark suite: the results of a cell."""

from devtools.cells import HostSuites, check_resume, smoke_cell
from quest_suites.timm import tasks
from quest_suites.timm.suites import SUITES
from quest_suites.timm.tasks import run_strokes


def test_a_stopped_cell_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("quest_suites.contract.SAVE_STEPS", 2)
    for name, small in (("BATCH", 8), ("TEST_IMAGES", 32)):
        monkeypatch.setattr(tasks, name, small)
    result = check_resume(run_strokes, smoke_cell(SUITES, tmp_path, "vision/strokes"), tmp_path, 0.5)
    assert 0 <= result.metrics["accuracy"] <= 100
    assert "attention=quest in 4 modules" in result.details["injected"]


class TestSuites(HostSuites):
    committed = ("time/timm",)
    places = ("docs",)
