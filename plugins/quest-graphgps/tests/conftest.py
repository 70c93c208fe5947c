"""Tests in GraphGPS, which is on no package index, run only if QUEST_GRAPHGPS_ROOT names a checkout."""

import os

import pytest

ROOT = os.environ.get("QUEST_GRAPHGPS_ROOT", "")
REAL = "test_real_graphgps.py"
# A skip would fail in CI, and a checkout cannot be installed.
collect_ignore = [] if ROOT else [REAL]
NOT_RUN = (
    f"quest-graphgps's tests in GraphGPS itself ({REAL}); set QUEST_GRAPHGPS_ROOT to a checkout of rampasek/GraphGPS "
    "whose requirements are installed. QUEST_REQUIRE_GRAPHGPS=1 makes their absence a failure"
)


def pytest_configure() -> None:
    if not ROOT and os.environ.get("QUEST_REQUIRE_GRAPHGPS") == "1":
        raise pytest.UsageError(f"NOT RUN: {NOT_RUN}")


def pytest_report_header() -> str:
    return f"GraphGPS: the checkout in QUEST_GRAPHGPS_ROOT ({ROOT})" if ROOT else f"NOT RUN: {NOT_RUN}"


@pytest.fixture(scope="session", autouse=True)
def _say_what_did_not_run(record_testsuite_property):
    if not ROOT:
        record_testsuite_property("not run", NOT_RUN)  # ./dev test repeats it in its summary


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROOT:
        terminalreporter.section("NOT RUN", red=True)
        terminalreporter.line(f"{NOT_RUN}. These tests ran PyTorch Geometric with the plugin's own GPS model.")
