"""A pytest plugin that makes failures explain themselves: ``pytest -p quest_core.testing.pytest_plugin``.

- A skip without a reason is a failure. With ``QUEST_NO_SKIP=1`` every skip is a failure, for machines that are meant
  to have all that the tests need. Expected failures are not changed.
- A test that the installed PyTorch is too old for is skipped; this skip does not count as a failure: see `versions`.
- Every run draws other random numbers. The header, and the summary of a failed run, name the seed that repeats them:
  ``QUEST_TEST_SEED=1234 pytest ...``.
- Every test starts with one PyTorch thread. The tensors of tests are tiny, and on a busy machine two threads wait for
  each other for minutes.
- If pytest-timeout stops a test, the processes that the test started are aborted first. Python processes then print
  their stacks, which the test can still show.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

from . import versions

NO_REASON = ("", "unconditional skip")  # pytest's text for a test without a reason
SEED = pytest.StashKey[int]()
ABORTED = pytest.StashKey[list[int]]()  # the processes of a test that ran out of time
ABORT_S = 10  # for aborted processes to print their stacks, and for the test to show them

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


# --- skips ----------------------------------------------------------------------------------------------------------


def _examine(report: Report) -> Report:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped:").strip()
    if reason in NO_REASON:
        report.outcome = "failed"
        report.longrepr = 'skipped without a reason; write pytest.skip("why") or @pytest.mark.skip(reason="why")'
    elif os.environ.get("QUEST_NO_SKIP") == "1" and not reason.startswith(versions.PREFIX):
        report.outcome = "failed"
        report.longrepr = f"skipped although QUEST_NO_SKIP=1: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = versions.lacks(call.excinfo.value) if call.excinfo is not None and report.outcome == "failed" else None
    if why is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.reportinfo()[1] or 0, f"Skipped: {why}")
    report = _examine(report)
    if ABORTED in item.stash and report.when == "call" and report.outcome == "passed":
        report.outcome = "failed"
        report.longrepr = f"ran out of time: it passed only after its processes {item.stash[ABORTED]} were aborted"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _examine((yield))


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    text = os.environ.get("QUEST_TEST_SEED", "")
    if text and not (text.isdecimal() and int(text) < 2**32):
        raise pytest.UsageError(f"QUEST_TEST_SEED is '{text}'; it must be a whole number from 0 to {2**32 - 1}")
    config.stash[SEED] = int(text) if text else secrets.randbelow(2**32)
    os.environ["QUEST_TEST_SEED"] = str(config.stash[SEED])  # for the workers of pytest-xdist
    if getattr(config.option, "hypothesis_seed", "") is None:  # hypothesis is installed, and no option names a seed
        config.option.hypothesis_seed = str(config.stash[SEED])
    config.addinivalue_line("markers", "slow: takes seconds, such as a compilation")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # for the processes that tests start
    config.addinivalue_line("markers", "needs_torch(version, what): skipped if PyTorch is older than `version`")


def pytest_report_header(config: pytest.Config) -> str:
    return f"QUEST_TEST_SEED={config.stash[SEED]} repeats the random numbers of this run"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.line(pytest_report_header(config), yellow=True)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed the generators of Python, NumPy and PyTorch before every test; returns the seed of this run."""
    value = request.config.stash[SEED]
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    return value


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(1)  # the test before may have called a command that sets it
    for mark in item.iter_markers("needs_torch"):
        versions.needs_torch(*mark.args)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Abort the processes of a test that runs out of time, and let pytest-timeout fail the test ABORT_S later."""
    done = yield
    if settings.method == "signal" and hasattr(time, "CLOCK_BOOTTIME"):  # a Linux
        fail = signal.getsignal(signal.SIGALRM)
        start = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

        def abort(number: int, frame: FrameType | None) -> None:
            if ABORTED in item.stash or not (processes := _descendants(start)):
                fail(number, frame)  # type: ignore[operator, misc]
                return
            item.stash[ABORTED] = processes
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            signal.setitimer(signal.ITIMER_REAL, ABORT_S)

        signal.signal(signal.SIGALRM, abort)
    return done


def _descendants(since: int) -> list[int]:
    """The processes that this one and its children started at `since` or later, in clock ticks since boot."""
    parent, started = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parent[pid], started[pid] = int(fields[1]), int(fields[19])
    found, generation = [], {os.getpid()}
    while generation:
        generation = {pid for pid in parent if parent[pid] in generation}
        found += [pid for pid in generation if started[pid] >= since]
    return found
