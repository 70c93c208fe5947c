"""Two processes that all tests of this folder share, because starting them takes longer than the tests."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

WORLD = 2
START_S = 120.0
GRACE_S = 3.0


class RankFailure(AssertionError):
    """A rank raised, died or never answered; the message is the rank's own traceback."""


class Ranks:
    """Processes of one gloo group on the CPU, each waiting for functions to run."""

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """``function(rank, *arguments)`` on every rank at once; what each returned, which must pickle.

        `function` is at the top of a module. A rank that fails takes the others down with it, because they may wait for
        it; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers(timeout)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = str(Path(tempfile.mkdtemp(prefix="quest-ranks-"), "meet"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(START_S)

    def _answers(self, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + timeout
        while len(answers) + len(failures) < self.world and time.monotonic() < end:
            waiting = [p for r, p in enumerate(self._pipes) if r not in answers and r not in failures]
            for pipe in wait(waiting, timeout=0.5):
                rank = self._pipes.index(pipe)
                try:
                    ok, value = self._pipes[rank].recv()
                except EOFError:
                    ok, value = False, "the process died without a word"
                (answers if ok else failures)[rank] = value
                if not ok:
                    end = min(end, time.monotonic() + GRACE_S)  # the others may be waiting for this one
        if failures or len(answers) < self.world:
            self.stop()
            silent = [r for r in range(self.world) if r not in answers and r not in failures]
            text = "\n".join(f"rank {rank}:\n{why}" for rank, why in sorted(failures.items()))
            raise RankFailure(text + (f"\nno answer from ranks {silent}" if silent else ""))
        return [answers[rank] for rank in range(self.world)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, world: int, meeting: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    pipe.send((True, None))
    while True:
        function, arguments = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
