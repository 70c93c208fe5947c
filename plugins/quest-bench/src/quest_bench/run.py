"""Runs a plan's cells, each in a process of its own, a few at a time, and shows how they get on."""

from __future__ import annotations

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

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from quest_suites.contract import Cell

from . import store, worker
from .plan import Suite

RETRY_S = 1.0  # how long to wait before asking again for a cell that another orchestrator runs


@dataclass
class Outcome:
    """What happened to the cells of one `quest bench run`."""

    done: list[Cell] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    stopped: signal.Signals | None = None  # the signal that ended the run


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


class _Running:
    """The process of a cell, with its place among the jobs and what it has said."""

    def __init__(self, cell: Cell, place: int, process: subprocess.Popen[bytes]) -> None:
        self.cell, self.place, self.process = cell, place, process
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
        for message in map(json.loads, lines):
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


class Display:
    """Where the course of a run is shown; a method that a display does not define shows nothing."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, cell: Cell) -> None:
        pass

    def progress(self, cell: Cell, fraction: float, text: str) -> None:
        pass

    def finish(self, cell: Cell, message: str, good: bool) -> None:
        pass

    def put_back(self, cell: Cell) -> None:
        pass

    def beat(self, running: Sequence[tuple[Cell, float, str, float]]) -> None:
        pass


def label(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{cell.task} · {cell.attention} · seed {cell.seed}"


class Bars(Display):
    """An overall bar and one line for each running cell, on a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, total)
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

    def __enter__(self) -> Display:
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
        self.put_back(cell)
        self.finished += 1
        self.bars.update(self.all, completed=self.finished, text=f"{self.finished} of {self.total}")
        mark = ("✓ ", "green") if good else ("✗ ", "red")
        self.console.print(Text.assemble(mark, label(cell), "  ", message))

    def put_back(self, cell: Cell) -> None:
        self.bars.remove_task(self.lines.pop(cell.workdir))


class Lines(Display):
    """Plain lines for logs and pipes: one when a cell ends, and one for each running cell at every beat."""

    def finish(self, cell: Cell, message: str, good: bool) -> None:
        self.finished += 1
        word = "done  " if good else "failed"
        self._print(f"[{self.finished}/{self.total}] {word} {label(cell)}  {message}")

    def beat(self, running: Sequence[tuple[Cell, float, str, float]]) -> None:
        for cell, fraction, text, seconds in running:
            line = f"[{self.finished}/{self.total}] running {label(cell)}  {100 * fraction:.0f} %"
            self._print(f"{line} after {seconds:.0f} s  {text}".rstrip())

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def signal_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that ends a run."""
    return stop.signal if isinstance(stop, Stopped) else signal.SIGINT


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does; under nohup, SIGHUP stays ignored."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Runner:
    """Runs cells of one suite, each in a process of its own: `jobs` at a time with `threads` threads each.

    Args:
        gpus: numbers of devices among those that this process sees; place i sees only ``gpus[i % len(gpus)]``. None
            leaves devices as they are.
        timeout: seconds after which a cell is ended and counts as failed; None waits.
        beat: seconds between the lines that a run without a terminal prints for its running cells.
    """

    def __init__(
        self,
        suite: Suite,
        python: str,
        console: Console,
        *,
        jobs: int,
        threads: int,
        gpus: Sequence[int] | None = None,
        timeout: float | None = None,
        beat: float = 60.0,
    ) -> None:
        self.suite, self.python, self.console = suite, python, console
        self.jobs, self.threads, self.timeout, self.beat = jobs, threads, timeout, beat
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        common = {**os.environ, "PYTHONUNBUFFERED": "1", **{name: str(threads) for name in names}}
        self.environments = [dict(common) for _ in range(jobs)]
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))  # as Slurm deals them
        for place, environment in enumerate(self.environments):
            if gpus:
                gpu = gpus[place % len(gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)

    def run(self, cells: Sequence[Cell]) -> Outcome:
        """Run every cell that has no result yet.

        A cell that another orchestrator runs is asked for again until it has ended. Ctrl-C, or in `signals` SIGTERM or
        SIGHUP, ends the processes and returns with `stopped` set; finished results stay.
        """
        before = {cell.workdir: store.state(cell) for cell in cells}
        outcome = Outcome(skipped=[cell for cell in cells if before[cell.workdir] == "done"])
        waiting = deque(cell for cell in cells if before[cell.workdir] != "done")
        shown = Bars(self.console, len(waiting)) if self.console.is_terminal else Lines(self.console, len(waiting))
        free, running = deque(range(self.jobs)), list[_Running]()
        next_beat, retry = time.monotonic() + self.beat, 0.0
        try:
            with shown as display:
                while waiting or running:
                    while waiting and free and time.monotonic() >= retry:
                        running.append(self._start(waiting.popleft(), free.popleft()))
                        display.start(running[-1].cell)
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
                        free.append(one.place)
                        if not one.busy:
                            self._finish(one, outcome, display)
                            continue
                        display.put_back(one.cell)
                        if before[one.cell.workdir] == "new" and store.state(one.cell) == "failed":
                            reason = store.load(one.cell.workdir.parent).error or ""
                            outcome.failed.append((one.cell, reason.strip()))  # in another orchestrator
                        else:
                            waiting.append(one.cell)
                            retry = time.monotonic() + RETRY_S
                    if time.monotonic() >= next_beat:
                        next_beat = time.monotonic() + self.beat
                        display.beat([(one.cell, one.fraction, one.text, one.seconds) for one in running])
        except KeyboardInterrupt as stop:
            outcome.stopped = signal_of(stop)
        finally:
            for one in running:
                one.kill()
            for one in running:
                one.end()
        return outcome

    def _start(self, cell: Cell, place: int) -> _Running:
        path = store.prepare(cell, self.suite.metric)
        with path.with_name("log.txt").open("ab") as log:  # appended to, because another orchestrator may run the cell
            process = subprocess.Popen(
                [self.python, worker.__file__, "cell", str(path.resolve())],
                stdin=subprocess.PIPE,  # the life line: it closes when this process ends
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self.environments[place],
                start_new_session=True,  # Ctrl-C reaches only the orchestrator
            )
        return _Running(cell, place, process)

    def _finish(self, one: _Running, outcome: Outcome, display: Display) -> None:
        """Take in a cell whose process has ended."""
        found = store.load(one.cell.workdir.parent)
        if found.result is not None:  # whole, even if the process fell over on its way out
            value = found.result["metrics"][self.suite.metric]
            good = math.isfinite(value)
            outcome.done.append(one.cell)
            note = "" if good else "; it diverged and counts as a failed seed"
            text = f"{self.suite.metric} {value:.4g}{self.suite.unit} in {one.seconds:.1f} s{note}"
            display.finish(one.cell, text, good)
            return
        reason = one.error or found.error or _exit_reason(one.process.returncode)
        with contextlib.suppress(OSError):
            store.fail(found.folder, reason)
        outcome.failed.append((one.cell, reason))
        display.finish(one.cell, (reason.splitlines() or [""])[0], False)


def _exit_reason(status: int) -> str:
    """The end of a cell's process in words, from its return code."""
    if status >= 0:
        return f"the cell's process ended with exit code {status} and no result"
    name = signal.Signals(-status).name
    hint = "; the system may have run out of memory: try fewer --jobs" if name == "SIGKILL" else ""
    return f"the cell's process was ended by {name}{hint}"
