"""Run commands and test suites, and count their results. Standard library only."""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from devtools.environments import ROOT

STATE = ROOT / ".nox"  # environments and logs
LOGS = STATE / "logs"
LIMIT_S = 60 * 60  # of a command with a log
TAIL_LINES = 60
NO_TESTS = 5  # pytest's exit status if it collected nothing
X, Y = TypeVar("X"), TypeVar("Y")
_running: set[subprocess.Popen[bytes]] = set()  # the commands of `run`


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the process environment without what lets in packages from outside of a virtual environment.

    PYTHONDONTWRITEBYTECODE, which many container images set, goes too: every process would compile its host again.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"PYTHONNOUSERSITE": "1"} | extra


def python(*arguments: str, cwd: Path, path: Sequence[Path] = ()) -> tuple[str, str]:
    """Run the Python of this process in a new one, which must succeed; return its output and its errors.

    Args:
        path: folders before those of this process's sys.path.
    """
    folders = os.pathsep.join([*map(str, path), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout, done.stderr


def run(command: Sequence[str | Path], log: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """Run a command in the root and return its exit status; its processes end with it, also on an interrupt.

    Args:
        log: the file to append the output to. With it, the command has no input and at most LIMIT_S seconds (status
            124 if it needs more).
        env: the process environment; `clean_environment()` by default.
    """
    with contextlib.ExitStack() as stack:
        out = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log.open("a"))
            print("$", *command, file=out, flush=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment() if env is None else env,
            stdin=None if out is None else subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            return process.wait(None if out is None else LIMIT_S)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _end(process)
            process.wait()
            _running.remove(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # they have ended
        os.killpg(process.pid, signal.SIGKILL)


def side_by_side(function: Callable[[X], Y], items: Iterable[X], workers: int = 2) -> list[Y]:
    """Return the results of a function that calls `run`, some at a time. An interrupt ends all commands."""
    with ThreadPoolExecutor(workers) as pool:
        results = [pool.submit(function, item) for item in items]
        try:
            return [result.result() for result in results]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(result.done() for result in results):  # a function may be about to run its next command
                for process in [*_running]:
                    _end(process)
                time.sleep(0.05)
            raise


def tail(log: Path) -> str:
    """Return the end of a log, or all of it in CI, where the file is lost."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join("    " + line for line in (lines if os.environ.get("CI") else lines[-TAIL_LINES:]))


@dataclass
class Stage:
    """One command of a longer run, and its result."""

    name: str
    ok: bool = True
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skips: Counter[str] = field(default_factory=Counter)  # reason -> number of tests
    report: Path | None = None  # pytest's junit file

    def __str__(self) -> str:
        tested = self.passed or self.failed or self.skips
        counts = f"{self.passed} passed, {self.failed} failed, {self.skips.total()} skipped" if tested else ""
        return f"{'ok    ' if self.ok else 'FAILED'}  {self.name:<28} {self.seconds:6.1f} s  {counts}".rstrip()

    def read(self, report: Path) -> None:
        """Add the counts of a junit file. An expected failure has passed."""
        root = ElementTree.parse(report).getroot()
        for case in root.iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed += 1
            elif skipped is not None and skipped.get("type") != "pytest.xfail":
                reason = skipped.get("message", "")
                if reason == "collection skipped":  # of a whole file, whose text is ('file', line, 'Skipped: reason')
                    reason = ast.literal_eval(skipped.text or "")[2].removeprefix("Skipped: ")
                self.skips[reason] += 1
            else:
                self.passed += 1


def command_stage(name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Stage:
    """Run a command as a stage with a log, print its line, and if it fails the end of its log."""
    log = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    start = time.monotonic()
    ok = run(command, log, env) == 0
    stage = Stage(name, ok, time.monotonic() - start)
    print(stage if ok else f"{stage}\n{tail(log)}", flush=True)
    return stage


def pytest_stage(
    name: str,
    python: str | Path,
    paths: Sequence[Path | str],
    options: Sequence[str],
    *,
    live: bool = False,
    env: Mapping[str, str] | None = None,
) -> Stage:
    """Run pytest under the root's settings as a stage.

    Args:
        live: show the output. A selection that matches no test is then no failure.
        env: the process environment; by default one with one thread, because the tensors of tests are tiny.
    """
    report = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command: list[str | Path] = [python, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    # The package first: pytest then rewrites the conformance suite's assertions, so that they say what they compared.
    for plugin in ("quest_core.testing", "devtools.pytest_plugin"):
        command += ["-p", plugin]
    command += ["-q", f"--junitxml={report}", *options, *paths]
    env = clean_environment(OMP_NUM_THREADS="1") if env is None else env
    print(f"...     {name}", flush=True)
    if live:
        start = time.monotonic()
        stage = Stage(name, run(command, None, env) in (0, NO_TESTS), time.monotonic() - start)
    else:
        stage = command_stage(name, command, env)
    if report.exists():
        stage.report = report
        stage.read(report)
    return stage


def summary(stages: Sequence[Stage]) -> tuple[bool, str]:
    """Print what came of every stage; return whether all are right, and the closing line."""
    print("", *stages, sep="\n")
    skips = sum((stage.skips for stage in stages), Counter[str]())
    for reason, count in skips.most_common():
        print(f"skipped {count}: {reason}")
    passed = sum(stage.passed for stage in stages)
    # A failed stage without a failed test (a linter, an environment, a crash) counts as one failure.
    failed = sum(stage.failed if stage.failed or stage.ok else 1 for stage in stages)
    return all(stage.ok for stage in stages), f"{passed} passed, {failed} failed, {skips.total()} skipped"
