"""The pytest plugin of this repository: ``pytest -p devtools.pytest_plugin``.

- Every run draws other random numbers. The header, and the summary of a failed run, name the seed that repeats them:
  ``QUEST_TEST_SEED=1234 pytest ...``.
- Every test starts with one PyTorch thread. The tensors of tests are tiny, and on a busy machine two threads wait for
  each other for minutes.
- A skip without a reason is a failure. With ``QUEST_NO_SKIP=1`` every skip is a failure, for machines that are meant
  to have all that the tests need. Expected failures are not changed, nor are skips because PyTorch is too old, or
  because a test needs a checkout of a host that is on no index.
- A test that the installed PyTorch is too old for is skipped: see `versions`.
- A test without the mark `slow` that works for more than LIMIT_S fails the run. The time is that of the processor, of
  the test and of the processes that it waited for. On a busy or slow machine, where that grows too, the limit is
  IMPORTS times the time of `import torch`, measured at the end.
- The mark ``drawn(n)`` on a parametrized test chooses n of its cases by the seed of the run, QUEST_TEST_SEED; the
  others are marked `slow`.
"""

import gc
import os
import random
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator
from typing import TypeVar

import pytest
import torch

from devtools import versions

NO_REASON = ("", "unconditional skip")  # pytest's text for a test without a reason
LIMIT_S, IMPORTS = 5.0, 6
ALLOWED = (versions.PREFIX, "needs a checkout")
"""How a reason begins that ``QUEST_NO_SKIP=1`` allows, because no package would change the skip."""
SEED, START = pytest.StashKey[int](), pytest.StashKey[float]()
OVER = pytest.StashKey[dict[str, float]]()

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    text = os.environ.get("QUEST_TEST_SEED", "")
    if text and not (text.isdecimal() and int(text) < 2**32):
        raise pytest.UsageError(f"QUEST_TEST_SEED is '{text}'; it must be a whole number from 0 to {2**32 - 1}")
    config.stash[SEED] = int(text) if text else secrets.randbelow(2**32)
    os.environ["QUEST_TEST_SEED"] = str(config.stash[SEED])  # for the workers of pytest-xdist
    if getattr(config.option, "hypothesis_seed", "") is None:  # hypothesis is installed, and no option names a seed
        config.option.hypothesis_seed = str(config.stash[SEED])
    config.stash[OVER] = {}
    config.pluginmanager.register(_Collector(config.stash[OVER]))
    config.addinivalue_line("markers", "slow: takes seconds, such as a compilation")
    config.addinivalue_line("markers", "drawn(n): only n cases, which the seed of the run chooses, are not slow")


def pytest_report_header(config: pytest.Config) -> str:
    return f"QUEST_TEST_SEED={config.stash[SEED]} repeats the random numbers of this run"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed the generators of Python, NumPy and PyTorch before every test; returns the seed of this run."""
    value = request.config.stash[SEED]
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    return value


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, own in cases.items():
        count = own[0].get_closest_marker("drawn").args[0]  # type: ignore[union-attr]
        chosen = random.Random(f"{os.environ.get('QUEST_TEST_SEED')} {name}").sample(own, min(count, len(own)))
        for item in own:
            if item not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()  # no garbage collection in a test looks at the million objects of an imported host


# --- skips ----------------------------------------------------------------------------------------------------------


def _examine(report: Report) -> Report:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped:").strip()
    if reason in NO_REASON:
        report.outcome = "failed"
        report.longrepr = 'skipped without a reason; write pytest.skip("why") or @pytest.mark.skip(reason="why")'
    elif os.environ.get("QUEST_NO_SKIP") == "1" and not reason.startswith(ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped although QUEST_NO_SKIP=1: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "call" and START in item.stash:  # before the end of fixtures of the session
        item.user_properties.append(("processor_s", _processor_seconds() - item.stash[START]))
    report = yield
    why = versions.lacks(call.excinfo.value) if call.excinfo is not None and report.outcome == "failed" else None
    if why is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.reportinfo()[1] or 0, f"Skipped: {why}")
    return _examine(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _examine((yield))


# --- processor time -------------------------------------------------------------------------------------------------


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(1)  # the test before may have called a command that sets it
    item.stash[START] = _processor_seconds()
    for mark in item.iter_markers("needs_torch"):
        versions.needs_torch(*mark.args)


class _Collector:
    """Collects the times, which the workers of pytest-xdist send with their reports."""

    def __init__(self, over: dict[str, float]) -> None:
        self.over = over

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = next((float(str(value)) for name, value in report.user_properties if name == "processor_s"), 0.0)
        if report.when == "teardown" and seconds > LIMIT_S and "slow" not in report.keywords:
            self.over[report.nodeid] = seconds


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    over = session.config.stash[OVER]
    if over and not hasattr(session.config, "workerinput"):  # a worker of pytest-xdist
        limit = max(LIMIT_S, IMPORTS * _seconds_of_import())
        session.config.stash[OVER] = over = {name: seconds for name, seconds in over.items() if seconds > limit}
        if over and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _seconds_of_import() -> float:
    """Return the processor time of a new process that imports PyTorch."""
    before = _processor_seconds()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return _processor_seconds() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.line(pytest_report_header(config), yellow=True)
    for name, seconds in sorted(config.stash[OVER].items(), key=lambda one: -one[1]):
        terminalreporter.line(f"FAILED: {seconds:.1f} s of processor time; mark it slow, or make it faster: {name}")
