"""Runs a plan's cells in worker processes, a few at a time, and shows how they get on."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from quest_core.benchmarks import Cell

from . import store, worker
from .plan import Suite


@dataclass
class Outcome:
    """What happened to the cells of one `quest bench run`."""

    done: list[Cell] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    interrupted: bool = False


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[str]
    log: IO[str]
    started: float
    error: str = ""
    progress: float = 0.0


class Display(Protocol):
    """Where the course of a run is shown."""

    def start(self, cell: Cell) -> None: ...
    def progress(self, cell: Cell, fraction: float, text: str) -> None: ...
    def finish(self, cell: Cell, message: str, good: bool) -> None: ...


def label(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{cell.task} · {cell.attention} · seed {cell.seed}"


class Bars:
    """An overall bar and one line for each running cell, for a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[text]}"),
            console=console,
        )
        self.all = self.bars.add_task("[bold]all cells", total=total, text=f"0 of {total}")
        self.lines: dict[Path, TaskID] = {}
        self.finished, self.total = 0, total

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines.values():
            self.bars.remove_task(line)
        self.bars.stop()

    def start(self, cell: Cell) -> None:
        self.lines[cell.workdir] = self.bars.add_task(label(cell), total=1.0, text="starting")

    def progress(self, cell: Cell, fraction: float, text: str) -> None:
        self.bars.update(self.lines[cell.workdir], completed=fraction, text=text)

    def finish(self, cell: Cell, message: str, good: bool) -> None:
        self.bars.remove_task(self.lines.pop(cell.workdir))
        self.finished += 1
        self.bars.update(self.all, completed=self.finished, text=f"{self.finished} of {self.total}")
        mark = ("✓ ", "green") if good else ("✗ ", "red")
        self.bars.console.print(Text.assemble(mark, label(cell), "  ", message))


class Lines:
    """One plain line when a cell ends, for logs and pipes."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self, cell: Cell) -> None:
        return None

    def progress(self, cell: Cell, fraction: float, text: str) -> None:
        return None

    def finish(self, cell: Cell, message: str, good: bool) -> None:
        self.finished += 1
        word = "done  " if good else "failed"
        line = f"[{self.finished}/{self.total}] {word} {label(cell)}  {message}"
        self.console.print(Text(line), soft_wrap=True)


def run_cells(cells: Sequence[Cell], suite: Suite, python: str, jobs: int, threads: int, console: Console) -> Outcome:
    """Run every cell that has no result yet, `jobs` at a time with `threads` threads each.

    Ctrl-C ends the workers and returns with `interrupted` set; finished results stay.
    """
    outcome = Outcome(skipped=[cell for cell in cells if store.state(cell) == "done"])
    waiting = [cell for cell in cells if store.state(cell) != "done"]
    messages: queue.Queue[tuple[_Running, dict[str, Any] | None]] = queue.Queue()
    running: list[_Running] = []
    total = len(waiting)
    shown = Bars(console, total) if console.is_terminal else Lines(console, total)
    try:
        with shown as display:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(waiting.pop(0), suite, python, threads, messages))
                    display.start(running[-1].cell)
                one, message = messages.get()
                if message is None:  # its standard output closed: it has ended
                    running.remove(one)
                    _finish(one, suite, outcome, display)
                elif "error" in message:
                    one.error = message["error"]
                else:
                    display.progress(one.cell, message["progress"], message["text"])
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        for one in running:
            _kill(one.process)
            one.log.close()
    return outcome


def _start(
    cell: Cell, suite: Suite, python: str, threads: int, messages: queue.Queue[tuple[_Running, dict[str, Any] | None]]
) -> _Running:
    path = store.prepare(cell, suite.metric)
    log = path.with_name("log.txt").open("w", encoding="utf-8")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    process = subprocess.Popen(
        [python, worker.__file__, "run", str(path)],
        stdin=subprocess.PIPE,  # the life line: never written to, closes when this process ends
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **{name: str(threads) for name in names}},
        start_new_session=True,  # Ctrl-C reaches the orchestrator alone, which ends the whole group of a worker
    )
    one = _Running(cell, process, log, time.monotonic())
    threading.Thread(target=_listen, args=(one, messages), daemon=True).start()
    return one


def _listen(one: _Running, messages: queue.Queue[tuple[_Running, dict[str, Any] | None]]) -> None:
    assert one.process.stdout is not None
    with one.process.stdout as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a killed worker may leave half a line
                messages.put((one, json.loads(line)))
    one.process.wait()
    messages.put((one, None))


def _finish(one: _Running, suite: Suite, outcome: Outcome, display: Display) -> None:
    _kill(one.process)  # children that it left behind
    one.log.close()
    folder = one.cell.workdir.parent
    seconds = time.monotonic() - one.started
    result = store.load(folder).result
    if result is not None:  # it is whole, even if the worker fell over on its way out
        value = result["metrics"][suite.metric]
        outcome.done.append(one.cell)
        display.finish(one.cell, f"{suite.metric} {value:.4g}{suite.unit} in {seconds:.1f} s", True)
        return
    reason = one.error or _exit_reason(one.process.returncode)
    store.fail(folder, reason)
    outcome.failed.append((one.cell, reason))
    display.finish(one.cell, reason.splitlines()[0], False)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the worker ended with exit code {code} and no result"
    name = signal.Signals(-code).name
    hint = "; the system may have run out of memory: try fewer --jobs" if name == "SIGKILL" else ""
    return f"the worker was ended by {name}{hint}"


def _kill(process: subprocess.Popen[str]) -> None:
    """End a worker and everything it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()
