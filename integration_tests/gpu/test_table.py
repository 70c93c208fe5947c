"""The page research/results/gpu.md: nothing hidden, mistakes named; the suite itself is tested by quest-bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from . import command, measure, table


def test_the_page_shows_the_report_the_steps_and_the_tests(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "lacks report.md" in capsys.readouterr().err
    (run / "report").mkdir()
    for name in set(table.REPORT) - {"report"}:
        (run / name).write_text("measured")
    for _ in range(2):  # a second time it takes the place of the first
        assert table.main(given) == 0
    text = out.read_text()
    assert capsys.readouterr().out.count(text.strip()) == 2
    assert "[Report](gpu/report.md)" in text
    assert (tmp_path / "gpu" / "results.parquet").read_text() == "measured"
    assert "| `test_backends.py` |" in text
    assert "| 1 | 0 | 1 |" in text
    assert "Not yet measured: fairseq, graphgps, mmseg, pointcept, tsai." in text
    assert f"torch {torch.__version__}" in text
    assert "| quest | 3.00 | 1.25 (1.20–1.30) |" in text
    with pytest.raises(SystemExit):
        table.main(["--not-measured", "--out", str(out)])
    assert "holds measurements" in capsys.readouterr().err


def test_the_committed_page_is_what_the_command_writes() -> None:
    """Until there are measurements: every attention, framework and test is on it as not yet measured."""
    text = table.not_measured()
    assert table.suite_command() in text
    assert {file.host for file in table.suite()} == {None, "fairseq", "graphgps", "mmseg", "pointcept", "tsai"}
    marked = {path.name for path in Path(table.__file__).parent.glob("test_*.py")}
    assert marked == {file.name for file in table.suite()}
    assert all(f"| `{file.name}` |" in text for file in table.suite())
    page = Path(__file__).parents[2] / "research" / "results" / "gpu.md"
    if not page.with_suffix("").exists():
        assert page.read_text() == text, "./dev gpu --table writes it"


@pytest.mark.parametrize(("cuda", "status", "count"), [(True, 0, 3), (True, 2, 1), (False, 0, 1)])
def test_the_table_is_a_suite_of_quest_bench(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, status: int, count: int
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], log: None, env: dict[str, str]) -> int:
        ran.append(words[1:])
        return status

    monkeypatch.setattr(command, "run", run)
    assert command._table(Path("python"), cuda, {}) == status
    folder = str(command.RESULTS / "attention")
    writing = ["-m", "integration_tests.gpu.table"]
    wanted = [
        ["-m", "quest_bench.cli", *command.SUITE, "--out", folder],
        ["-m", "quest_bench.cli", "report", folder],
        [*writing, "--run", folder],
    ]
    assert ran == (wanted if cuda else [[*writing, "--not-measured"]])[:count]


def test_ratios_are_taken_round_by_round() -> None:
    """The machine slows down fourfold half-way; a contender that always takes twice the peer's time shows 2."""
    peer = [1.0, 1.0, 4.0, 4.0]
    assert measure.against([2 * x for x in peer], peer).ratio == 2
