"""docs/coverage.md: the page and its data agree, and no model is left silently."""

import runpy
from pathlib import Path


def test_the_page_is_that_of_the_data():
    coverage = runpy.run_path(str(Path(__file__).resolve().parents[1] / "docs" / "coverage.py"), run_name="coverage")
    rows = coverage["read"]().values()
    assert rows
    assert {row.outcome for row in rows} <= {"taken", "none", "not", "unbuilt"}
    assert all(bool(row.reason) == (row.outcome in ("not", "unbuilt")) for row in rows)
    assert [row for row in rows if "silent:" in row.reason] == []
    assert coverage["PAGE"].read_text() == coverage["render"](rows), "run python docs/coverage.py --page"
