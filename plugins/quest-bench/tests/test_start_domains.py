"""docs/results/start-domains/README.md holds what its script prints."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "results" / "start-domains"


def test_the_table_is_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "compare.py"), run_name="__main__")
    assert capsys.readouterr().out in (FOLDER / "README.md").read_text()
