"""The time of an attention as a ratio to a named peer, measured in the same run.

Contenders take turns, round after round, in a shuffled order. Each round gives one ratio for each of them, so a machine
that slows down for a while slows all of them. Every call gets fresh tensors, as every training step does. Each number
of threads is measured in a process of its own, because thread pools keep the first number that they see.
"""

import argparse
import contextlib
import ctypes
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import quest_core
from quest_bench.cli import expand_home
from quest_bench.plan import parse_attentions, portable
from quest_bench.store import commit
from quest_bench.worker import cores, machine, write_text
from quest_core.errors import ConfigError, QuestError
from quest_suites.timing import Timer, in_turns

Attend = Callable[..., Tensor]
Shape = tuple[int, int, int, int]
Fresh = Callable[[bool], tuple[list[Tensor], list[Tensor], Tensor]]

SHAPES: tuple[Shape, ...] = (
    (8, 3, 197, 64),
    (4, 8, 512, 64),
    (1, 8, 2048, 64),
    (16, 4, 1024, 16),
    (64, 4, 25, 16),
    (16, 8, 29, 16),
)
"""(B, H, N, D): a ViT's tokens, two lengths of language models, point-cloud patches, small graphs, time series."""

LINEAR_SHAPE: Shape = (1, 8, 16384, 64)

NAME = "python -m quest_research.speed"
PEER = "scaled_dot_product_attention"
FORMULA = "three-line quest"
NAIVE = "naive linear"
DIRECTIONS = ("forward", "forward+backward")


def three_lines(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """QUEST as a user would write it: [B, H, N, D] each -> [B, H, N, D]."""
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, attn_mask, scale=1.0)


def naive_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as a user would write it: [B, H, N, D] each -> [B, H, N, D]."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weight = q @ k.sum(2, keepdim=True).mT  # [B, H, N, 1]
    return q @ (k.mT @ v) / weight


@dataclass(frozen=True)
class Plan:
    attentions: tuple[str, ...] = ("quest", "standard")
    shapes: tuple[Shape, ...] = SHAPES
    linear_shape: Shape | None = LINEAR_SHAPE  # where linear attention is compared with its naive formula
    layouts: tuple[str, ...] = ("contiguous", "packed")  # or "padded"
    rounds: int = 31  # how often each contender takes its turn, at least 2
    slice_seconds: float = 0.03  # that one turn lasts

    def smoke(self) -> "Plan":
        """The same at small sizes, for seconds; the numbers mean nothing."""
        shapes = tuple((max(1, b // 4), h, max(8, n // 8), d) for b, h, n, d in self.shapes)
        linear = self.linear_shape and (1, 8, 512, 64)
        return replace(self, shapes=shapes, linear_shape=linear, rounds=2, slice_seconds=0.0)


@dataclass(frozen=True)
class Row:
    direction: str
    peer: str
    where: tuple[Shape, str, int]  # the shape, the layout and the number of threads
    milliseconds: float  # of the peer, the median
    ratios: dict[str, list[float]]  # contender -> the quartiles of its time as a multiple of the peer's


def contenders(plan: Plan, peer: str, shape: Shape) -> dict[str, Attend]:
    """Return the contenders at a shape (B, H, N, D); `peer` is the first."""
    _, heads, _, dim = shape

    def made(attention: str) -> quest_core.Mechanism:
        return quest_core.Mechanism(attention, num_heads=heads, head_dim=dim)

    if peer == NAIVE:
        return {NAIVE: naive_linear, "linear": made("linear")}
    own = {str(quest_core.AttentionConfig.parse(attention)): made(attention) for attention in plan.attentions}
    return {PEER: F.scaled_dot_product_attention, FORMULA: three_lines, **own}


def fresh(layout: str, shape: Shape) -> Fresh:
    """Return a function that makes new inputs: (with gradients?) -> (leaves, [q, k, v], gradient of the output).

    With the layout "packed" q, k and v are views of one leaf [B, N, 3·H·D], as a packed projection returns it; with
    the others each is a leaf [B, H, N, D].
    """
    batch, heads, n, dim = shape
    torch.manual_seed(0)
    gradient = torch.randn(batch, n, heads, dim)
    stored = torch.randn(3, batch, heads, n, dim)

    def make(backward: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        if layout != "packed":
            leaves = [x.clone().requires_grad_(backward) for x in stored]
            return leaves, leaves, gradient.clone().transpose(1, 2)
        leaf = stored.clone().view(batch, n, 3 * heads * dim).requires_grad_(backward)
        q, k, v = leaf.unflatten(2, (3, heads, dim)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
        return [leaf], [q, k, v], gradient.clone().transpose(1, 2)

    return make


def padding(shape: Shape) -> Tensor:
    """Return a boolean mask [B, 1, 1, N] that hides the last quarter of the keys."""
    batch, _, n, _ = shape
    return (torch.arange(n) < n - n // 4).expand(batch, 1, 1, n).contiguous()


def _time(attend: Attend, make: Fresh, backward: bool, how: dict[str, Tensor], repeats: int) -> float:
    """Seconds of one call with fresh tensors, the mean of `repeats` calls; making the tensors does not count."""
    parameters = list(attend.parameters()) if isinstance(attend, torch.nn.Module) else []
    total = 0.0
    for _ in range(repeats):
        leaves, arguments, gradient = make(backward)
        started = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = attend(*arguments, **how)
        if backward:
            torch.autograd.grad(out, [*leaves, *parameters], gradient, allow_unused=True)
        total += time.perf_counter() - started
        del out
    return total / repeats


def measure(plan: Plan, threads: int) -> list[Row]:
    """Time every contender, in this process and with its number of threads, which the rows record."""
    rows: list[Row] = []
    races = [(PEER, shape) for shape in plan.shapes] + ([(NAIVE, plan.linear_shape)] if plan.linear_shape else [])
    for (peer, shape), layout, backward in itertools.product(races, plan.layouts, (False, True)):
        print(f"{threads} threads: {shape} {layout} {DIRECTIONS[backward]}", file=sys.stderr, flush=True)
        make, racing = fresh(layout, shape), contenders(plan, peer, shape)
        how = {"attn_mask": padding(shape)} if layout == "padded" else {}
        timers: dict[str, Timer] = {
            name: partial(_time, attend, make, backward, how) for name, attend in racing.items()
        }
        times = in_turns(timers, plan.rounds, plan.slice_seconds)
        base = times.pop(peer)
        ratios = {name: [one / other for one, other in zip(own, base, strict=True)] for name, own in times.items()}
        quartiles = {name: statistics.quantiles(own, n=4, method="inclusive") for name, own in ratios.items()}
        where = (shape, layout, threads)
        rows.append(Row(DIRECTIONS[backward], peer, where, 1e3 * statistics.median(base), quartiles))
    return rows


def start(threads: int) -> None:
    """Set the threads of a measuring process, and let glibc keep freed memory.

    Without it a process that holds little else gives every freed tensor back to the system and faults it in again,
    page by page, at the next call: up to 600 faults for one tensor of 1 MB, more than the attention itself takes.
    A training process, whose heap is large, does not do that. Without glibc, only the threads are set.
    """
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):
        for threshold in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(threshold, 2**30)


def measure_apart(plan: Plan, threads: int) -> list[Row]:
    """`measure` in a new process that has `threads` threads from its start; raises what an attention raises there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=start, initargs=(threads,)) as pool:
        return pool.submit(measure, plan, threads).result()


def markdown(rows: list[Row]) -> str:
    """A table for each direction and peer: shapes, layouts and threads down, contenders across."""
    lines = []
    for direction, peer in itertools.product(DIRECTIONS, (PEER, NAIVE)):
        own = [row for row in rows if (row.direction, row.peer) == (direction, peer)]
        if not own:
            continue
        names = list(own[0].ratios)
        lines += [
            f"### {direction}, against {peer}\n",
            f"| (B, H, N, D) | layout | threads | {peer} | " + " | ".join(names) + " |",
            "|---|---|---:|---:|" + "---|" * len(names),
        ]
        for row in own:
            ratios = [f"{middle:.3f} ({low:.3f}-{high:.3f})" for low, middle, high in row.ratios.values()]
            lines.append(f"| {' | '.join([*map(str, row.where), f'{row.milliseconds:.3f} ms', *ratios])} |")
        lines.append("")
    return "\n".join(lines)


def check_threads(given: Sequence[int] | None) -> Sequence[int]:
    """Return the numbers of threads to measure; without any, those of 1, 2 and 4 that this machine has cores for."""
    here = cores()
    for threads in given or ():
        if not 1 <= threads <= here:
            raise ConfigError(f"--threads has {threads}; this process may use 1 to {here} cores")
    return given or [threads for threads in (1, 2, 4) if threads <= here]


def instruction_set() -> str:
    """Return the instruction set that PyTorch uses on this processor."""
    forced = os.environ.get("ATEN_CPU_CAPABILITY")
    return torch.backends.cpu.get_cpu_capability() + (f" (ATEN_CPU_CAPABILITY={forced})" if forced else "")


def run(plan: Plan, out: Path | None, *, threads: Sequence[int] | None, command: str) -> str:
    """Measure, write ``speed.md`` into `out` and return the report."""
    numbers, started = check_threads(threads), time.monotonic()
    rows = [row for number in numbers for row in measure_apart(plan, number)]
    rows.sort(key=lambda row: [*plan.shapes, plan.linear_shape].index(row.where[0]))
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    text = f"""# Speed of attention

Command: `{command}` ({math.ceil(time.monotonic() - started)} s), commit {commit() or "unknown"}.

Machine: {facts}; {instruction_set()}, torch {torch.__version__}, float32.

Each cell is the time as a multiple of the peer's in the same round: the median of {plan.rounds} rounds and, in \
brackets, the middle half of them. Contenders take turns in shuffled order, and every call gets fresh tensors. \
Layout contiguous: q, k, v of shape [B, H, N, D]. Layout packed: views of one projection [B, N, 3·H·D], to which the \
gradient flows. Layout padded: as contiguous, with a boolean mask [B, 1, 1, N] that hides the last quarter of the \
keys. Freed memory stays with the process, as in a training process with a large heap.

{markdown(rows)}"""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "speed.md", text)
    return text


def whole_numbers(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    return tuple(map(int, text.split(",")))


def shape(text: str) -> Shape:
    """ "4,8,512,64" -> (B, H, N, D)."""
    batch, heads, n, dim = whole_numbers(text)
    return batch, heads, n, dim


def main(argv: list[str]) -> None:
    """Time attentions against their peers in PyTorch, in turns within one run, and print the report."""
    parser = argparse.ArgumentParser(prog=NAME, description=main.__doc__)
    parser.add_argument("--attention", default="quest,standard", help="comma-separated, without groupings")
    parser.add_argument("--out", type=expand_home, metavar="DIR", help="the folder of the page")
    parser.add_argument(
        "--threads", type=whole_numbers, metavar="N,...", help="of the CPU; by default 1,2,4 up to the number of cores"
    )
    parser.add_argument("--rounds", type=int, default=31, help="how often each contender takes its turn, at least 2")
    parser.add_argument(
        "--shape", type=shape, action="append", metavar="B,H,N,D", help="in place of the usual ones; may be repeated"
    )
    parser.add_argument("--padded", action="store_true", help="with padding, in place of the packed layout")
    parser.add_argument("--smoke", action="store_true", help="small sizes, one thread; the numbers mean nothing")
    given = parser.parse_args(argv)
    try:
        plan = Plan(attentions=tuple(parse_attentions(given.attention)), rounds=given.rounds)
        if given.shape:
            plan = replace(plan, shapes=tuple(given.shape), linear_shape=None)
        if given.padded:
            plan = replace(plan, layouts=("contiguous", "padded"), linear_shape=None)
        if given.smoke:
            plan, given.threads = plan.smoke(), given.threads or (1,)
        print(run(plan, given.out, threads=given.threads, command=portable([*NAME.split(), *argv])))
    except QuestError as error:
        parser.error(str(error))
