"""Runs a plan's cells, each in a process of its own, a few at a time, and shows how they get on."""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from quest_suites.contract import Cell

from . import store, worker
from .plan import Suite


@dataclass
class Outcome:
    """What happened to the cells of one `quest bench run`."""

    done: list[Cell] = field(default_factory=list)
    elsewhere: list[Cell] = field(default_factory=list)  # run now in another command
    failed: list[Cell] = field(default_factory=list)
    stopped: signal.Signals | None = None  # the signal that ended the run


class Stopped(KeyboardInterrupt):
    """SIGTERM arrived."""


class _Running:
    """The process of a cell, and what it has said."""

    def __init__(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        self.cell, self.process = cell, process
        assert process.stdout is not None
        self.channel = process.stdout
        os.set_blocking(self.channel.fileno(), False)
        self.begun = time.monotonic()  # not the clock of the system, which may jump
        self.pending, self.text, self.error = b"", "", ""
        self.fraction, self.busy, self.closed = 0.0, False, False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def read(self) -> bool:
        """Take in what the process has written; returns whether there was any progress."""
        news = False
        while block := self.channel.read(65536):
            self.pending += block
        self.closed = block == b""  # None: nothing yet
        *lines, self.pending = self.pending.split(b"\n")
        for message in map(_message, lines):
            self.busy = self.busy or "busy" in message
            self.error = message.get("error", self.error)
            if "progress" in message:
                news, self.fraction, self.text = True, message["progress"], message["text"]
        return news

    def kill(self) -> None:
        """End the process and those it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for the process, take in its last words, and end the processes that it left behind."""
        self.process.wait()
        self.kill()
        self.read()
        self.channel.close()
        if self.process.stdin:
            self.process.stdin.close()


def _message(line: bytes) -> dict[str, Any]:
    """Return the message of a line, empty for one that a module printed while the process of a cell started."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def label(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{cell.task} · {cell.attention} · seed {cell.seed}"


class Display:
    """Shows a run: a line for each cell that ends, and on a terminal bars for all cells and those that run."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.all = self.bars.add_task("[bold]all cells", total=total, text=f"0 of {total}")
        self.running: dict[Path, TaskID] = {}

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self.running.values():
            self.bars.remove_task(bar)
        self.bars.stop()

    def start(self, cell: Cell) -> None:
        self.running[cell.workdir] = self.bars.add_task(label(cell), total=1.0, text="starting")

    def progress(self, cell: Cell, fraction: float, text: str) -> None:
        self.bars.update(self.running[cell.workdir], completed=fraction, text=text)

    def finish(self, cell: Cell, message: str, good: bool) -> None:
        self.remove(cell)
        self.finished += 1
        self.bars.update(self.all, completed=self.finished, text=f"{self.finished} of {self.total}")
        mark = ("done  ", "green") if good else ("failed", "red")
        line = Text.assemble(f"[{self.finished}/{self.total}] ", mark, f" {label(cell)}  {message}")
        self.console.print(line, soft_wrap=True)

    def remove(self, cell: Cell) -> None:
        self.bars.remove_task(self.running.pop(cell.workdir))


def signal_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that ends a run."""
    return signal.SIGTERM if isinstance(stop, Stopped) else signal.SIGINT


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does."""

    def stop(number: int, _: object) -> None:
        raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Runner:
    """Runs cells of one suite, each in a process of its own: `jobs` at a time with `threads` threads each.

    Args:
        timeout: seconds after which a cell is ended and counts as failed; None waits.
    """

    def __init__(
        self,
        suite: Suite,
        python: str,
        console: Console,
        *,
        jobs: int,
        threads: int,
        timeout: float | None = None,
    ) -> None:
        self.suite, self.python, self.console = suite, python, console
        self.jobs, self.threads, self.timeout = jobs, threads, timeout
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", **{name: str(threads) for name in names}}

    def run(self, cells: Sequence[Cell]) -> Outcome:
        """Run every cell that has no result yet. `quest_bench.store.prepare` has made their folders.

        A cell that another command runs, or has ended meanwhile, is left to it. Ctrl-C, or in `signals` SIGTERM,
        ends the processes and returns with `stopped` set; finished results stay.
        """
        before = {cell.workdir: store.state(cell) for cell in cells}
        outcome = Outcome()
        waiting = deque(cell for cell in cells if before[cell.workdir] != "done")
        running: list[_Running] = []
        try:
            with Display(self.console, len(waiting)) as display:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        cell = waiting.popleft()
                        if store.state(cell) == before[cell.workdir]:
                            running.append(self._start(cell))
                            display.start(cell)
                    select.select([one.channel for one in running if not one.closed], [], [], 0.1)
                    for one in list(running):
                        if one.read():
                            display.progress(one.cell, one.fraction, one.text)
                        if self.timeout and one.seconds > self.timeout:
                            one.error = f"timed out after {self.timeout:g} s (--timeout)"
                            one.kill()
                        elif one.process.poll() is None:
                            continue
                        one.end()
                        running.remove(one)
                        self._finish(one, outcome, display)
        except KeyboardInterrupt as stop:
            outcome.stopped = signal_of(stop)
        finally:
            for one in running:
                one.kill()
            for one in running:
                one.end()
        return outcome

    def _start(self, cell: Cell) -> _Running:
        path = cell.workdir.with_name("cell.json")
        with path.with_name("log.txt").open("ab") as log:  # appended to, because another orchestrator may run the cell
            process = subprocess.Popen(
                [self.python, worker.__file__, "cell", str(path.resolve())],
                stdin=subprocess.PIPE,  # the life line: it closes when this process ends
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self.environment,
                start_new_session=True,  # Ctrl-C reaches only the orchestrator
            )
        return _Running(cell, process)

    def _finish(self, one: _Running, outcome: Outcome, display: Display) -> None:
        """Take in a cell whose process has ended."""
        if one.busy:
            outcome.elsewhere.append(one.cell)
            display.remove(one.cell)
            return
        found = store.load(one.cell.workdir.parent)
        if found.result is not None:  # whole, even if the process fell over on its way out
            value = found.result["metrics"][self.suite.metric]
            good = math.isfinite(value)
            outcome.done.append(one.cell)
            note = "" if good else "; it diverged and counts as a failed seed"
            unit = {"%": "%", "": ""}.get(self.suite.unit, f" {self.suite.unit}")
            text = f"{self.suite.metric} {value:.4g}{unit} in {one.seconds:.1f} s{note}"
            display.finish(one.cell, text, good)
            return
        reason = one.error or found.error or _exit_reason(one.process.returncode)
        with contextlib.suppress(OSError):
            store.fail(found.folder, reason)
        outcome.failed.append(one.cell)
        display.finish(one.cell, (reason.splitlines() or [""])[0], False)


def _exit_reason(status: int) -> str:
    """The end of a cell's process in words, from its return code."""
    if status >= 0:
        return f"the cell's process ended with exit code {status} and no result"
    name = signal.Signals(-status).name
    hint = "; the system may have run out of memory: try fewer --jobs" if name == "SIGKILL" else ""
    return f"the cell's process was ended by {name}{hint}"
