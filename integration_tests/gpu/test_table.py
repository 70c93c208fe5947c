"""The page research/results/gpu.md: nothing hidden, mistakes named; the suite itself is tested by quest-bench."""

import json
from pathlib import Path

import pytest
import torch

from quest_bench.cli import app_main

from . import command, measure, table


def test_the_page_shows_the_report_the_steps_and_the_tests(tmp_path, device, capsys):
    steps = tmp_path / "steps"
    steps.mkdir()
    timing = {"milliseconds": 3.0, "ratio": 1.25, "low": 1.2, "high": 1.3, "rounds": 3}
    row = {"attention": "quest", "precision": "bf16", "timing": timing}
    host = {
        "host": "a framework",
        "version": "1.0",
        "model": "tiny",
        "versions": measure.versions(device),
        "rows": [row],
    }
    (steps / "a.json").write_text(json.dumps(host))
    case = '<testcase classname="integration_tests.gpu.test_backends" name="a">{}</testcase>'
    (steps / "gpu.xml").write_text(f"<testsuite>{case.format('')}{case.format('<skipped/>')}</testsuite>")
    run, out = tmp_path / "run", tmp_path / "gpu.md"
    run.mkdir()
    given = ["--run", str(run), "--out", str(out), "--steps", str(steps), "--device", device]
    with pytest.raises(SystemExit):
        table.main(given)
    assert "holds no cells; first: quest bench run" in capsys.readouterr().err
    measuring = ["run", "gpu/attention/N=25", "--attention", "standard", "--seeds", "0", "--smoke", "--out", str(run)]
    assert app_main(measuring) == 0
    capsys.readouterr()
    for _ in range(2):  # a second time it takes the place of the first
        assert table.main(given) == 0
    text = out.read_text()
    assert capsys.readouterr().out.count(text.strip()) == 2
    assert "| Forward and backward | N=25 |" in text
    assert (tmp_path / "gpu" / "results.parquet").exists()
    assert "| `test_backends.py` |" in text
    assert "| 1 | 0 | 1 |" in text
    assert "| `test_tsai.py` | tsai's TSTPlus by fastai's own trainer and mixed precision | not run |" in text
    assert f"torch {torch.__version__}" in text
    assert "| quest | 3.00 | 1.25 (1.20–1.30) |" in text


@pytest.mark.parametrize(("status", "count"), [(0, 2), (2, 1)])
def test_the_table_is_a_suite_of_quest_bench(monkeypatch, status, count):
    ran = []

    def run(words, log, env):
        ran.append(words[1:])
        return status

    monkeypatch.setattr(command, "run", run)
    assert command._table(Path("python"), {}) == status
    folder = str(command.RESULTS / "attention")
    wanted = [
        ["-m", "quest_bench.cli", *command.SUITE, "--out", folder],
        ["-m", "integration_tests.gpu.table", "--run", folder],
    ]
    assert ran == wanted[:count]


def test_ratios_are_taken_round_by_round():
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    peer = [1.0, 1.0, 4.0, 4.0]
    assert measure.against([2 * x for x in peer], peer).ratio == 2
