"""A pytest plugin that names the tests that take too long for the short tier: ``pytest -p devtools.pytest_time``.

It measures the processor time of a test and of the processes that it waited for, which a busy machine changes less than
the clock. A test over LIMIT_S without the mark `slow` is reported. With QUEST_TIMED=2 it also fails the run if it takes
more than twice LIMIT_S.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

LIMIT_S = 5.0
START = pytest.StashKey[float]()
OVER = pytest.StashKey[dict[str, float]]()


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OVER] = {}
    config.pluginmanager.register(_Collector(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[START] = processor_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown" and START in item.stash:
        item.user_properties.append(("processor_s", processor_seconds() - item.stash[START]))
    return (yield)


class _Collector:
    """Collects the times, which the workers of pytest-xdist send with their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.over = config.stash[OVER]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = next((float(str(value)) for name, value in report.user_properties if name == "processor_s"), 0.0)
        if report.when == "teardown" and seconds > LIMIT_S and "slow" not in report.keywords:
            self.over[report.nodeid] = seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, seconds in sorted(config.stash[OVER].items(), key=lambda one: -one[1]):
        terminalreporter.line(f"{seconds:.1f} s of processor time, over {LIMIT_S:g} without the mark slow: {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    limit = LIMIT_S * float(os.environ.get("QUEST_TIMED") or "inf")
    if exitstatus == 0 and any(seconds > limit for seconds in session.config.stash[OVER].values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
