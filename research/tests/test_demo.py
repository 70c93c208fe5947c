"""The demonstration: its sentence and its report, from one short cell of each attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from quest_research import demo


@pytest.mark.slow
def test_the_demo_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SEEDS", range(2))
    monkeypatch.setattr(demo, "SUITE", "images/digits/lr=0.003")
    monkeypatch.setattr(demo, "SETTINGS", ["epochs=1"])
    assert demo.main(["--out", "out"]) == 0
    shown = capfd.readouterr().out
    assert "A small Vision Transformer on handwritten digits, 2 seeds: at learning rate 0.003 " in shown
    assert "the largest logit ends at " in shown
    assert "report with pictures: out/report.html" in shown
    assert Path("out/report.html").is_file()
