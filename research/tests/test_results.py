"""The commands of research/results still run, shortened; those of host plugins are tested in their environments."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from devtools.cells import run_committed
from quest_bench.groups import read_groups
from quest_research.speed.speed import NAME, main
from quest_research.suites import images

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = [path.parent for path in RESULTS.glob("**/results.parquet")]
SUITES = [
    "aft/causal",
    "calibration/pydocs",
    "explain/fashion-mnist",
    "gpu/attention",
    "gqa/fashion-mnist",
    "images/fashion-mnist",
    "robustness/images",
    "stability/rates",
    "toy/spurious",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_committed_suite_runs(data, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "DEBIAN", data)
    ran = run_committed(RESULTS, SUITES, tmp_path)
    assert {cell.split()[0] for cell in ran} == set(SUITES)


@pytest.mark.slow
def test_every_committed_measurement_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(path.read_text() for path in RESULTS.rglob("*.md") if "zoo" not in path.parts)  # not installed
    commands = re.findall(f"`{NAME} ([^`]*)`", text)
    assert commands
    for command in commands:
        main([*shlex.split(command), "--smoke"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_committed_results_can_be_read(folder):
    groups = read_groups(folder, "standard")
    assert groups
    assert all(row.finished for group in groups for row in group.rows)


def test_the_page_of_several_reports_has_the_tables_that_its_script_prints(capsys):
    runpy.run_path(str(RESULTS.parent / "scripts" / "stability.py"), run_name="__main__")
    page = (RESULTS / "stability" / "README.md").read_text()
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table for table in tables if table not in page] == []
    assert len(tables) == 6
