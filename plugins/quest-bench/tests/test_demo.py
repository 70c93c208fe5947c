"""The demonstration's course, on the plugin for tests instead of minutes of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from quest_bench import demo


def test_demo_runs_reports_and_resumes(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = (("fake/suite/one", ["standard", "quest"], [0], []), ("fake/suite/two", ["quest"], [0], ["steps=2"]))
    monkeypatch.setattr(demo, "STEPS", steps[:1])
    assert demo.main(["--out", "out"]) == 0
    shown = capfd.readouterr().out
    assert "15.00" in shown
    assert "report: out/report.html" in shown
    assert Path("out/report.html").is_file()
    monkeypatch.setattr(demo, "STEPS", steps)
    assert demo.main(["--out", "out"]) == 2  # another value of an option, in the same folder
    assert "--set steps" in capfd.readouterr().err


def test_missing_plugin_is_told_before_anything_runs(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STEPS", (("fake/suite", ["quest"], [0], []), ("no/suite", ["quest"], [0], [])))
    assert demo.main([]) == 2
    assert "no suite 'no/suite'" in capfd.readouterr().err
    assert not Path("runs").exists()
