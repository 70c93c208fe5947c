"""The demonstration: its sentence and its report, from one short cell of each attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from quest_research import demo
from quest_research.suites.suites import SUITES


@pytest.mark.slow
def test_the_demo_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SEEDS", range(2))
    declared = SUITES["images/digits"]
    short = [{**one, "default": {"epochs": 1}.get(one["name"], one["default"])} for one in declared["options"]]
    monkeypatch.setitem(SUITES, "images/digits", {**declared, "tasks": ["lr=0.003"], "options": short})
    assert demo.main(["--out", "out"]) == 0
    shown = capfd.readouterr().out
    assert "A small Vision Transformer on handwritten digits, 2 seeds: at learning rate 0.003 " in shown
    assert "the largest logit ends at " in shown
    assert "report with pictures: out/report.html" in shown
    assert Path("out/report.html").is_file()
