"""The commands of the README and of research/results still run, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import CONFIGS

from devtools.cells import run_committed

PLACES = (Path(__file__).parents[1], Path(__file__).parents[3] / "research" / "results")
SUITES = ["transformers/bytes-lm", *(["time/transformers"] if "t5" in CONFIGS else [])]  # which times T5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_committed_command_runs(tmp_path: Path) -> None:
    ran = []
    for place in PLACES:
        folder = tmp_path / place.name
        folder.mkdir()
        ran += run_committed(place, SUITES, folder)
    assert {cell.split()[0] for cell in ran} == set(SUITES)
