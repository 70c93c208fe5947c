"""Import other packages in a child process, which may hang, crash or end without harm to this one.

The parent sends one job a line as JSON, and the child answers each with one line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from torch import nn

from ..catalogue import examine
from ..errors import PluginError
from ..hosts.discovery import discover, load_adapter, try_sites
from ..packages import contained, entries
from .rendering import rows

LIMIT_S = 60.0
"""Seconds that one import may take."""
START_S = 300.0  # for the child's own start, which imports PyTorch
CODE = "import sys; sys.path[:] = sys.argv[1:]; from quest_core.cli.child import serve; serve()"


@dataclass(frozen=True)
class Job:
    """What the child imports: the mechanisms, the command or the plugin (host, then adapter) of a distribution."""

    kind: str
    name: str
    distribution: str


@dataclass(frozen=True)
class Answer:
    """What became of a job.

    Attributes:
        problem: the cause why it cannot be used; empty if it can.
        at: what was imported then.
        parts: for mechanisms: name -> the lines that `quest list` shows.
    """

    problem: str = ""
    at: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)


def ask(jobs: Sequence[Job], limit: float = LIMIT_S) -> Iterator[Answer]:
    """Do jobs in a child process, and in a new one after a job that ended or outlasted it; yields answers in order."""
    rest = list(jobs)
    while rest:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            child = subprocess.Popen(
                [sys.executable, "-c", CODE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process, which ends the child and what that has started
            )
            lines: queue.SimpleQueue[str] = queue.SimpleQueue()
            reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
            reader.start()
            try:
                yield from _answers(child, rest, limit, lines, errors)
            finally:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                reader.join()


def _answers(
    child: subprocess.Popen[str], rest: list[Job], limit: float, lines: queue.SimpleQueue[str], errors: TextIO
) -> Iterator[Answer]:
    """Answers of one child; each job is taken from `rest` once it is answered."""
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write("".join(json.dumps(vars(job)) + "\n" for job in rest))
    seconds, at = START_S, ""
    while rest:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            problem = f"it does not end within {seconds:g} s"
        else:
            if line:
                message = json.loads(line)
                if "doing" in message:
                    seconds, at = limit, message["doing"]
                else:
                    del rest[0]
                    yield Answer(**message)
                continue
            problem = f"it ends the process ({_end(child, errors)})"
        if not at:
            raise PluginError(f"{sys.executable} cannot import quest_core: {problem}")
        del rest[0]
        yield Answer(problem, at)
        return


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert child.stdout is not None
    with child.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _end(child: subprocess.Popen[str], errors: TextIO) -> str:
    try:
        status = child.wait(5)
        text = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        text = "it closes standard output"
    errors.seek(0)
    said = errors.read().strip().splitlines()
    return f"{text}: {said[-1]}" if said else text


# --- in the child -------------------------------------------------------------------------------------------------


def serve() -> None:
    """Do the jobs that standard input names."""
    jobs = [Job(**json.loads(line)) for line in sys.stdin]
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of packages, from Python or C, go to standard error

    def send(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    for job in jobs:
        send(**vars(JOBS[job.kind](job, lambda what: send(doing=what))))
    os._exit(0)  # threads and exit handlers of packages do not run


def _mechanisms(job: Job, doing: Callable[[str], None]) -> Answer:
    for entry in entries("quest.attention"):
        if (entry.name, entry.distribution) == (job.name, job.distribution):
            doing(entry.value)
            package = examine(entry, {})
            return Answer(package.problem, entry.value, {part.name: rows(part) for part in package.parts})
    return Answer("its entry point has gone")


def _command(job: Job, doing: Callable[[str], None]) -> Answer:
    for entry in entries("quest.commands"):
        if (entry.name, entry.distribution) == (job.name, job.distribution):
            doing(entry.value)
            try:
                command = entry.load()
            except PluginError as error:
                return Answer(str(error), entry.value)
            return Answer("" if callable(command) else f"it is {type(command).__name__}, not a function", entry.value)
    return Answer("its entry point has gone")


def _plugin(job: Job, doing: Callable[[str], None]) -> Answer:
    record = next(record for record in discover() if (record.name, record.distribution) == (job.name, job.distribution))
    modules = [str(record.info[key]) for key in ("module", "checkout") if key in record.info]
    problems = []
    for module in modules:
        doing("host")
        try:
            with contained(f"{module}, the host of {record.distribution}"):
                importlib.import_module(module)
            break
        except PluginError as error:
            problems.append(f"import {module}: {error}")
    else:
        return Answer("; ".join(problems), "host")
    doing("adapter")
    try:
        try_sites(load_adapter(record), nn.Identity())
    except PluginError as error:
        return Answer(str(error.__cause__ or error), "adapter")
    return Answer()


JOBS: dict[str, Callable[[Job, Callable[[str], None]], Answer]] = {
    "mechanisms": _mechanisms,
    "command": _command,
    "plugin": _plugin,
}
