"""The page that compares several reports holds what its script prints now."""

import runpy
from pathlib import Path

RESEARCH = Path(__file__).parents[1]


def test_the_tables_are_what_the_script_prints(capsys):
    runpy.run_path(str(RESEARCH / "scripts" / "stability.py"), run_name="__main__")
    page = (RESEARCH / "results" / "stability" / "README.md").read_text()
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table for table in tables if table not in page] == []
    assert len(tables) == 6
