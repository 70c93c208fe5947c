"""Two processes that all tests of this folder share, because starting them takes longer than the tests."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any

WORLD = 2
START_S = 120.0


class Ranks:
    """Processes of one gloo group on the CPU, each waiting for functions to run."""

    def __init__(self) -> None:
        self._pools: list[ProcessPoolExecutor] = []  # of one process each

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """``function(rank, *arguments)`` on every rank at once; what each returned, which must pickle.

        `function` is at the top of a module. A rank that fails takes the others down with it, because they may wait for
        it; the next call starts new ones.
        """
        if not self._pools:
            meeting = f"file://{tempfile.mkdtemp(prefix='quest-ranks-')}/meet"
            spawn = multiprocessing.get_context("spawn")
            self._pools = [
                ProcessPoolExecutor(1, spawn, initializer=_join, initargs=(rank, meeting)) for rank in range(WORLD)
            ]
            self._answers(os.getpid, (), START_S)
        return self._answers(_call, (function, arguments), timeout)

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        calls = [pool.submit(function, *arguments) for pool in self._pools]
        try:
            for call in wait(calls, timeout, FIRST_EXCEPTION).done:
                call.result()  # raises what a rank raised, with its traceback
            return [call.result(timeout=0) for call in calls]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes."""
        for process in multiprocessing.active_children():
            process.kill()
        self._pools = []


def _join(rank: int, meeting: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    torch.manual_seed(0)
    return function(torch.distributed.get_rank(), *arguments)
