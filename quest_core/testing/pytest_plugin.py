"""A pytest plugin that keeps skips honest: ``pytest -p quest_core.testing.pytest_plugin``.

A skip without a reason is a failure. With ``QUEST_NO_SKIP=1`` every skip is a failure, for machines that are meant to
have all that the tests need. Expected failures are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

NO_REASON = ("", "unconditional skip")  # what pytest writes where a test gives no reason

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _examine(report: Report) -> Report:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped:").strip()
    if reason in NO_REASON:
        report.outcome = "failed"
        report.longrepr = 'skipped without a reason; write pytest.skip("why") or @pytest.mark.skip(reason="why")'
    elif os.environ.get("QUEST_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped although QUEST_NO_SKIP=1: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _examine((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _examine((yield))
