"""The commands of research/results still run, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from devtools.cells import run_committed

RESULTS = Path(__file__).parents[3] / "research" / "results"
SUITES = ["time/tsai", "ts/uea"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_committed_command_runs(tmp_path: Path) -> None:
    ran = run_committed(RESULTS, SUITES, tmp_path)
    assert {cell.split()[0] for cell in ran} == set(SUITES)
