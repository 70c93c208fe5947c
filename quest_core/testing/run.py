"""The conformance suites of an installed plugin with a readable table: `quest check --plugin`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from ..errors import PluginError
from ..hosts.plugins import find
from .conformance import AdapterConformance


def check_plugin(name: str) -> int:
    """Run the tests of every AdapterConformance class among the tests of a plugin.

    Args:
        name: an installed plugin, or a folder of tests.

    Returns:
        0 if all pass, else 1.

    Raises:
        PluginError: `name` is neither, or holds no AdapterConformance class.
    """
    folder = Path(name) if Path(name).exists() else _tests(name)
    table = _Table()
    started = time.perf_counter()
    modules = ("quest_core.testing", "quest_core.testing.pytest_plugin")
    options = [word for module in modules for word in ("-p", module)]
    # Without pytest's own terminal plugin, options such as -ra in the settings of a plugin would be unknown.
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        status = pytest.main([str(folder.resolve()), *options, "-p", "no:cacheprovider"], plugins=[table])
    table.show(time.perf_counter() - started)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise PluginError(f"'{folder}' has no test class that inherits quest_core.testing.AdapterConformance")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not table.problems:
        raise PluginError(f"pytest cannot run '{folder}':\n{said.getvalue()}")
    return 0 if status == pytest.ExitCode.OK and not table.problems else 1


def _tests(name: str) -> Path:
    """The tests of an installed plugin, in a checkout of its source."""
    distribution = find(name).distribution
    text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
    url = urllib.parse.urlparse(json.loads(text)["url"] if text else "")
    folder = Path(urllib.request.url2pathname(url.path), "tests")
    if url.scheme != "file" or not folder.is_dir():
        raise PluginError(
            f"{distribution} is installed without its tests; name their folder, in a checkout of its source: "
            "quest check --plugin FOLDER"
        )
    return folder


class _Table:
    """A pytest plugin that runs only conformance tests and keeps their outcomes."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )  # class -> test -> outcomes
        self.problems: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if issubclass(getattr(item, "cls", None) or object, AdapterConformance)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid} cannot be collected: {_last(report)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            _, kind, test = report.nodeid.split("::")
            self.cases[kind][test.partition("[")[0]].append(report.outcome)
            if report.failed:
                self.problems.append(f"{kind}.{test}: {_last(report)}")

    def show(self, seconds: float) -> None:
        for kind, tests in self.cases.items():
            print(kind)
            for test, outcomes in tests.items():
                words = test.removeprefix("test_").replace("_", " ")
                verdict = "FAILED" if "failed" in outcomes else "ok" if "passed" in outcomes else "skipped"
                print(f"  {verdict:<8} {outcomes.count('passed'):>3}/{len(outcomes):<3} {words}")
        for problem in self.problems:
            print(f"- {problem}")
        print(f"{sum(len(o) for tests in self.cases.values() for o in tests.values())} tests, {seconds:.0f} s")


def _last(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = text.strip().splitlines() or ["no message"]
    return lines[0] if crash else lines[-1]
