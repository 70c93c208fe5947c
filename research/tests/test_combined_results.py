"""The pages and pictures that compare several reports hold what their scripts make of them now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS.parent / "research" / "results"


@pytest.mark.parametrize("script", ["start_domains", "stability"])
def test_the_tables_are_what_the_script_prints(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(RESULTS.parent / "scripts" / f"{script}.py"), run_name="__main__")
    assert capsys.readouterr().out in (RESULTS / script.replace("_", "-") / "README.md").read_text()
