"""The demonstration: its sentence and its report, from short cells of each attention."""

from pathlib import Path

import pytest

from quest_research import demo


@pytest.mark.slow
def test_the_demo_says_what_was_found(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--out", "out", "--seeds", "0-1", "--set", "epochs=1"]) == 0
    shown = capfd.readouterr().out
    assert "A small Vision Transformer on handwritten digits, 2 seeds: at learning rate 0.003 " in shown
    assert "; at learning rate 0.03 " in shown
    assert "the largest logit ends at " in shown
    assert "report with pictures: out/report.html" in shown
    assert Path("out/report.html").is_file()
