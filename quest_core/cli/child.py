"""Import other packages in child processes, which may hang, crash or end without harm to this one."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn, TextIO

from torch import nn

from ..catalogue import parts
from ..errors import PluginError, QuestError
from ..hosts.discovery import discover
from ..hosts.loading import load_adapter, try_sites
from ..mechanism import Mechanism
from ..mechanisms.part import Part
from ..packages import cause, contained, entries, named_if_slow
from .rendering import rows

LIMIT_S = 60.0
"""Seconds that one import may take."""
CODE = "import sys; sys.path[:] = sys.argv[1:]; from quest_core.cli.child import serve; serve()"


@dataclass(frozen=True)
class Job:
    """One import: the mechanisms, the command or the plugin (host, then adapter) of a distribution."""

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
    """Do each job in a process of its own; yields the answers in order.

    The processes are forks of one child that has imported quest_core and nothing of other packages.
    """
    if not jobs:
        return
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process, which ends the child
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            json.dump([limit, [vars(job) for job in jobs]], child.stdin)
        with child.stdout:
            ready = child.stdout.readline()
            for job in jobs:
                with named_if_slow(f"{job.name} of {job.distribution}"):
                    line = ready and child.stdout.readline()
                if not line:
                    raise PluginError(f"{sys.executable} cannot import quest_core in a child process")
                yield Answer(**json.loads(line))
    finally:
        child.kill()
        child.wait()


# --- in the child -------------------------------------------------------------------------------------------------


def serve() -> None:
    """Do the jobs that standard input names, and write the answers to standard output."""
    limit, jobs = json.load(sys.stdin)
    print("ready", flush=True)
    for job in jobs:
        print(json.dumps(vars(_fork(Job(**job), limit))), flush=True)


def _fork(job: Job, limit: float) -> Answer:
    reading, writing = os.pipe()
    # Unbuffered, because `select` does not see what a buffer holds.
    with tempfile.TemporaryFile() as errors, os.fdopen(reading, "rb", buffering=0) as lines:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # a group, which is killed with all that the job has started
            for stream in (1, 2):
                os.dup2(errors.fileno(), stream)
            _do(job, os.fdopen(writing, "w"))
        os.close(writing)
        problem, at = "", ""
        try:
            while not problem:
                if not select.select([lines], [], [], limit)[0]:
                    problem = f"it does not end within {limit:g} s"
                elif line := lines.readline():
                    message = json.loads(line)
                    if "doing" not in message:
                        return Answer(**message)
                    at = message["doing"]
                else:
                    problem = f"it ends the process ({_end(pid, errors)})"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # waited for already
                os.waitpid(pid, 0)
        return Answer(problem, at)


def _end(pid: int, errors: IO[bytes]) -> str:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    return f"{text}: {said[-1]}" if said else text


def _do(job: Job, channel: TextIO) -> NoReturn:
    def send(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    send(**vars(JOBS[job.kind](job, lambda what: send(doing=what))))
    os._exit(0)  # threads and exit handlers of packages do not run


def _mechanisms(job: Job, doing: Callable[[str], None]) -> Answer:
    for entry in entries("quest.attention"):
        if (entry.name, entry.distribution) == (job.name, job.distribution):
            doing(entry.value)
            package = parts().only(entry)  # a fault of another package would be taken for one of this
            problems = (package.problem, *map(_unbuildable, package.parts))
            return Answer(next(filter(None, problems), ""), entry.value, {p.name: rows(p) for p in package.parts})
    return Answer("its entry point has gone")


def _unbuildable(part: Part) -> str:
    """Return why a mechanism cannot be built, or an empty text; it may refuse the heads tried by a QuestError."""
    grouped = any(option.name == "kv_heads" for option in part.options)
    try:
        Mechanism(f"{part.name}(kv_heads=2)" if grouped else part.name, num_heads=4, head_dim=16)
    except PluginError as error:
        return str(error)
    except QuestError:
        return ""
    except BaseException as error:
        return f"'{part.name}' cannot be built for 4 heads of 16 features: {cause(error)}"
    return ""


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
        made = load_adapter(record)
    except PluginError as error:
        other = _failed_import(error, {"quest_core", *(e.value.partition(".")[0] for e in entries("quest.adapters"))})
        said = str(error.__cause__ or error)
        return Answer(f"import {other}: {said}", "host") if other else Answer(said, "adapter")
    try:
        try_sites(made, nn.Identity())
    except PluginError as error:
        return Answer(str(error), "adapter")
    return Answer()


def _failed_import(error: BaseException, ours: Collection[str]) -> str:
    """Return the module of another package whose own code failed while a plugin imported it, or an empty text.

    Args:
        error: the PluginError of the adapter.
        ours: the packages of plugins and quest_core.
    """
    while isinstance(error, PluginError) and error.__cause__ is not None:
        error = error.__cause__
    frames = [
        frame for frame, _ in traceback.walk_tb(error.__traceback__) if "importlib" not in frame.f_code.co_filename
    ]
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    below = max((i for i, name in enumerate(names) if name.partition(".")[0] in ours), default=-1) + 1
    is_import = 0 < below < len(frames) and frames[below].f_code.co_name == "<module>"
    return names[below] if is_import else ""


JOBS: dict[str, Callable[[Job, Callable[[str], None]], Answer]] = {
    "mechanisms": _mechanisms,
    "command": _command,
    "plugin": _plugin,
}
