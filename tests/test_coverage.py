"""docs/coverage.md: the page and its data agree, and a process that ends without a row becomes one."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def coverage():
    spec = importlib.util.spec_from_file_location("docs_coverage", DOCS / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_data(coverage):
    rows = coverage.read()
    assert rows
    assert {row.outcome for row in rows.values()} <= {"taken", "none", "not", "unbuilt"}
    assert all(bool(row.reason) == (row.outcome in ("not", "unbuilt")) for row in rows.values())
    assert coverage.PAGE.read_text() == coverage.render(rows.values()), "run python docs/coverage.py --page"


def test_no_model_is_left_silently(coverage):
    silent = [key for key, row in coverage.read().items() if "silent:" in row.reason]
    assert not silent
