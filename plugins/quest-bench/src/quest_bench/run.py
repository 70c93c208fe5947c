"""Runs a plan's cells in worker processes, a few at a time, and shows how they get on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from quest_core.benchmarks import Cell

from . import store, worker
from .plan import Suite

RETRY_S = 1.0  # how long to wait before asking again for a cell that another orchestrator runs
GRACE_S = 300.0  # a worker that has not ended its cell so long after --timeout is itself hung


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


@dataclass
class _Slot:
    """A place for one cell at a time: a worker process and the environment it starts with."""

    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    cell: Cell | None = None
    started: float = 0.0
    text: str = ""
    fraction: float = 0.0


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
    """Runs cells of one suite: `jobs` worker processes with `threads` threads each.

    Args:
        gpus: numbers of devices among those that this process sees; worker i sees only ``gpus[i % len(gpus)]``. None
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
        self.timeout, self.beat = timeout, beat
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        common = {**os.environ, "PYTHONUNBUFFERED": "1", **{name: str(threads) for name in names}}
        self.slots = [_Slot(dict(common)) for _ in range(jobs)]
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))  # as Slurm deals them
        for place, slot in enumerate(self.slots):
            if gpus:
                gpu = gpus[place % len(gpus)]
                slot.environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)
        self.messages: queue.Queue[tuple[_Slot, subprocess.Popen[bytes], dict[str, Any] | None]] = queue.Queue()

    def run(self, cells: Sequence[Cell], out: Path) -> Outcome:
        """Run every cell that has no result yet.

        A cell that another orchestrator runs is asked for again until it has ended. Ctrl-C, or in `signals` SIGTERM or
        SIGHUP, ends the workers and returns with `stopped` set; finished results stay.
        """
        before = {cell.workdir: store.state(cell) for cell in cells}
        outcome = Outcome(skipped=[cell for cell in cells if before[cell.workdir] == "done"])
        waiting = deque(cell for cell in cells if before[cell.workdir] != "done")
        shown = Bars(self.console, len(waiting)) if self.console.is_terminal else Lines(self.console, len(waiting))
        next_beat, retry = time.monotonic() + self.beat, 0.0
        try:
            with shown as display:
                while waiting or any(slot.cell for slot in self.slots):
                    if time.monotonic() >= retry:
                        for slot in self.slots:
                            if waiting and slot.cell is None:
                                self._start(slot, waiting.popleft(), out)
                                display.start(slot.cell)  # type: ignore[arg-type]
                    pause = min(next_beat, retry if waiting else next_beat) - time.monotonic()
                    self._end_hung()
                    with contextlib.suppress(queue.Empty):
                        busy = self._handle(*self.messages.get(timeout=min(max(pause, 0.05), 5)), outcome, display)
                        if busy is not None:
                            if before[busy.workdir] == "new" and store.state(busy) == "failed":
                                reason = store.load(busy.workdir.parent).error or ""
                                outcome.failed.append((busy, reason.strip()))  # in another orchestrator
                            else:
                                waiting.append(busy)
                                retry = time.monotonic() + RETRY_S
                    if time.monotonic() >= next_beat:
                        next_beat = time.monotonic() + self.beat
                        now = time.monotonic()
                        display.beat([(s.cell, s.fraction, s.text, now - s.started) for s in self.slots if s.cell])
        except KeyboardInterrupt as stop:
            outcome.stopped = signal_of(stop)
        finally:
            for slot in self.slots:
                if slot.process and slot.process.stdin:
                    with contextlib.suppress(BrokenPipeError):
                        slot.process.stdin.close()  # all end at once
            for slot in self.slots:
                _close(slot)
        return outcome

    def _start(self, slot: _Slot, cell: Cell, out: Path) -> None:
        path = store.prepare(cell, self.suite.metric)
        slot.cell, slot.started, slot.text, slot.fraction = cell, time.monotonic(), "", 0.0
        if slot.process is None:
            logs = out / "workers"
            logs.mkdir(exist_ok=True)
            slot.log = (logs / f"{worker.machine()['id']}-{os.getpid()}-{self.slots.index(slot)}.txt").open("wb")
            slot.process = subprocess.Popen(
                [self.python, worker.__file__, "serve", self.suite.name, *self.suite.preload],
                stdin=subprocess.PIPE,  # the life line: it closes when this process ends
                stdout=subprocess.PIPE,
                stderr=slot.log,
                env=slot.environment,
                start_new_session=True,  # Ctrl-C reaches only the orchestrator
            )
            threading.Thread(target=self._listen, args=(slot, slot.process), daemon=True).start()
        assert slot.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, which its listener reports
            slot.process.stdin.write(
                json.dumps({"path": str(path.resolve()), "timeout": self.timeout}).encode() + b"\n"
            )
            slot.process.stdin.flush()

    def _end_hung(self) -> None:
        """Kill workers that do not end their cell at the timeout, for example because an import hangs."""
        for slot in self.slots:
            if self.timeout and slot.cell and time.monotonic() - slot.started > self.timeout + GRACE_S:
                _kill(slot.process)

    def _listen(self, slot: _Slot, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # a killed worker may leave half a line
                    self.messages.put((slot, process, json.loads(line)))
        process.wait()
        self.messages.put((slot, process, None))

    def _handle(
        self,
        slot: _Slot,
        process: subprocess.Popen[bytes],
        message: dict[str, Any] | None,
        outcome: Outcome,
        display: Display,
    ) -> Cell | None:
        """Take in one message; returns the cell if another orchestrator runs it."""
        cell = slot.cell
        if process is not slot.process:
            return None
        if cell is None:
            if message is None:
                _close(slot)  # it ended between two cells; the next cell gets a new worker
            return None
        if message is not None and "progress" in message:
            slot.fraction, slot.text = message["progress"], message["text"]
            display.progress(cell, slot.fraction, slot.text)
            return None
        folder = cell.workdir.parent
        slot.cell = None
        if message is None:
            _close(slot)
            if store.state(cell) == "done":
                message = {"end": "done"}
            else:
                hung = self.timeout and time.monotonic() - slot.started > self.timeout
                reason = f"timed out after {self.timeout:g} s (--timeout), and " if hung else ""
                reason += f"the worker ended with status {process.returncode}"
                if slot.log and Path(slot.log.name).is_file():  # removed if it is empty
                    reason += f"; its log: {slot.log.name}"
                store.fail(folder, reason)
                message = {"end": "failed", "error": reason}
        if message["end"] == "busy":
            display.put_back(cell)
            return cell
        if message["end"] == "done":
            result = store.load(folder).result
            if result is not None:
                value = result["metrics"][self.suite.metric]
                seconds = time.monotonic() - slot.started
                good = math.isfinite(value)
                outcome.done.append(cell)
                note = "" if good else "; it diverged and counts as a failed seed"
                display.finish(cell, f"{self.suite.metric} {value:.4g}{self.suite.unit} in {seconds:.1f} s{note}", good)
                return None
            message = {"error": store.load(folder).error or "result.json is missing"}
        outcome.failed.append((cell, message["error"]))
        display.finish(cell, (message["error"].splitlines() or [""])[0], False)
        return None


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a worker's process group; the group of its cell follows, because it watches the worker."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process:
            os.killpg(process.pid, signal.SIGKILL)


def _close(slot: _Slot) -> None:
    """End a worker and everything it started."""
    process, slot.process = slot.process, None
    if process is None:
        return
    if process.stdin:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # the worker ends its cell and itself
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
    if slot.log:
        slot.log.close()
        with contextlib.suppress(OSError):
            if Path(slot.log.name).stat().st_size == 0:
                Path(slot.log.name).unlink()
