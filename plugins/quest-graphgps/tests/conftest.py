"""Tests in GraphGPS, which is on no package index, run only if QUEST_GRAPHGPS_ROOT names a checkout."""

import os

import pytest

from devtools.pytest_plugin import NOT_RUN

ROOT = os.environ.get("QUEST_GRAPHGPS_ROOT", "")
REAL = "test_real_graphgps.py"
# A skip would fail in CI, and a checkout cannot be installed.
collect_ignore = [] if ROOT else [REAL]
WITHOUT = (
    f"quest-graphgps's tests in GraphGPS itself ({REAL}); set QUEST_GRAPHGPS_ROOT to a checkout of rampasek/GraphGPS "
    "whose requirements are installed. QUEST_REQUIRE_GRAPHGPS=1 makes their absence a failure"
)
if not ROOT:
    NOT_RUN.append(WITHOUT)


def pytest_configure() -> None:
    if not ROOT and os.environ.get("QUEST_REQUIRE_GRAPHGPS") == "1":
        raise pytest.UsageError(f"NOT RUN: {WITHOUT}")


def pytest_report_header() -> str:
    return f"GraphGPS: the checkout in QUEST_GRAPHGPS_ROOT ({ROOT})" if ROOT else f"NOT RUN: {WITHOUT}"
