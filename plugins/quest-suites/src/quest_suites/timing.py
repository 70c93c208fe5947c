"""The time and memory of a step against the host's own, for benchmark suites."""

import contextlib
import ctypes
import math
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from .contract import Cell, Progress, Result

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Step = Callable[[], object]
Timer = Callable[[int], float]
"""(repeats) -> seconds a call"""
Name = TypeVar("Name")


def in_turns(
    timers: Mapping[Name, Timer],
    rounds: int,
    slice_seconds: float = 0.0,
    seed: int = 0,
    progress: Progress = lambda share, text: None,
) -> dict[Name, list[float]]:
    """Return the seconds of each contender in each round; a turn lasts about `slice_seconds`, and at least one call.

    In each round all contenders take their turn, in a random order, so a machine that changes slows all of them alike.
    Two calls of each before do not count.
    """
    repeats: dict[Name, int] = {}
    for name, timed in timers.items():
        timed(1)
        repeats[name] = max(1, min(1000, int(slice_seconds / max(timed(1), 1e-7))))
    order, turn = random.Random(seed), list(timers)
    found: dict[Name, list[float]] = {name: [] for name in timers}
    for number in range(1, rounds + 1):
        order.shuffle(turn)
        for name in turn:
            found[name].append(timers[name](repeats[name]))
        progress(number / rounds, f"round {number}")
    return found


def against_stock(cell: Cell, progress: Progress, make: Callable[[str | None], Step]) -> Result:
    """Time a step with the host's own attention and one with the cell's, as `time_in_turns` does.

    Args:
        cell: its option `rounds` counts unless the run is a smoke run, which has two.
        make: returns a step with an attention, or for None with the host's own. The cell's seed is set before.
    """
    steps = []
    for attention in (None, cell.attention):
        torch.manual_seed(cell.seed)
        steps.append(make(attention))
    return time_in_turns(*steps, rounds=2 if cell.smoke else cell.options["rounds"], progress=progress)


def training_step(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> Step:
    """Return a step: forward, backward and, if there is one, the optimizer's."""

    def step() -> None:
        loss().backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()

    return step


def time_in_turns(stock: Step, own: Step, *, rounds: int, progress: Progress = lambda share, text: None) -> Result:
    """Time two steps in turns, and measure the memory of each.

    On a CPU the time is that of the processor, on a GPU that of the clock.

    Args:
        stock, own: one step with the host's own attention, and the same with that of the cell.

    Returns:
        Metrics ``time of stock`` (the median over the rounds of the ratio), ``least time of stock`` (the ratio of the
        shortest rounds, which other work on the machine changes least), ``seconds`` and ``stock seconds`` (the
        medians), ``memory of stock`` (the ratio of the peaks) and ``MiB``, both left out if stock's step does not raise
        the peak; series ``ratio`` by round.
    """
    steps = {"stock": stock, "own": own}
    memory = {name: peak_mib(step) for name, step in steps.items()}
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None

    def seconds(step: Step, repeats: int) -> float:
        wait()
        started = clock()
        for _ in range(repeats):
            step()
        wait()
        return (clock() - started) / repeats

    timers = {name: partial(seconds, step) for name, step in steps.items()}
    taken = in_turns(timers, rounds, progress=progress)
    ratios = [mine / theirs for mine, theirs in zip(taken["own"], taken["stock"], strict=True)]
    metrics = {
        "time of stock": statistics.median(ratios),
        "least time of stock": min(taken["own"]) / min(taken["stock"]),
        "seconds": statistics.median(taken["own"]),
        "stock seconds": statistics.median(taken["stock"]),
    }
    if memory["stock"] > 0:
        metrics |= {"memory of stock": memory["own"] / memory["stock"], "MiB": memory["own"]}
    return Result(metrics, {"ratio": ratios})


def peak_mib(step: Step) -> float:
    """Return by how many MiB a call raises the peak of memory: of a forked process on a CPU, allocated on a GPU.

    A call before it does not count: it imports modules, and the forked process maps the code that it runs. On Linux
    the heap then gives its free memory back, because a call that takes it again would not raise the peak.
    """
    if torch.cuda.is_available():
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):  # the caller's own call of the step shows the error
            torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
            step()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # the peak is now what the process holds
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            step()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(writing, str(peak / (2**20 if sys.platform == "darwin" else 2**10)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return float(text or math.nan)
