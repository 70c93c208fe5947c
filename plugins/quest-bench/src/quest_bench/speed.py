"""`quest bench speed`: how much time an attention takes, as a ratio against a named peer measured in the same run.

Contenders take turns, round after round, in a shuffled order; each round gives one ratio for each of them, so a machine
that slows down for a while slows all of them. What is reported is the median ratio and the middle half of the rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import quest_core
from quest_core.errors import ConfigError

from .store import machine

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = ((8, 3, 197, 64), (4, 8, 512, 64), (1, 8, 2048, 64), (64, 4, 25, 16), (16, 4, 1024, 16))
"""(B, H, N, D): a ViT's tokens, two language-model lengths, small graphs, point-cloud patches."""

PEER = "scaled_dot_product_attention"
FORMULA = "three-line quest"
DIRECTIONS = ("forward", "forward+backward")


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, scale=1.0)


@dataclass(frozen=True)
class Timing:
    """One contender at one shape in one direction; times in milliseconds, ratios against the peer."""

    shape: tuple[int, int, int, int]
    direction: str
    contender: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def contenders(attentions: list[str], heads: int, dim: int) -> dict[str, Attend]:
    """The peer, the formula as a user would write it, and every named attention through quest_core."""
    made: dict[str, Attend] = {PEER: F.scaled_dot_product_attention, FORMULA: _formula}
    for text in attentions:
        config = quest_core.AttentionConfig.parse(text)
        if any(part.learnable for part in config.specs()):
            made[str(config)] = quest_core.mechanism(config, num_heads=heads, head_dim=dim)
        elif config["grouping"] == "mha":
            made[str(config)] = lambda q, k, v, config=config: quest_core.attention(q, k, v, config)  # type: ignore[misc]
        else:
            raise ConfigError(f"attention '{config}': speed compares equal shapes, and a grouping has fewer keys")
    return made


def _time(attend: Attend, tensors: tuple[Tensor, Tensor, Tensor], backward: bool, repeats: int) -> float:
    """Seconds for one call."""
    cuda = tensors[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    if backward:
        for _ in range(repeats):
            out = attend(*tensors)
            out.backward(out.detach())
            for x in tensors:
                x.grad = None
    else:
        with torch.no_grad():
            for _ in range(repeats):
                attend(*tensors)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory.

    Without it a process that holds little else gives every freed tensor back to the system and faults it in again,
    page by page, at the next call: up to 600 faults for one tensor of 1 MB, more than what is to be measured.
    A training process, whose heap is large, does not do that. Where there is no glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**30)


def measure(
    attentions: list[str],
    shapes: tuple[tuple[int, int, int, int], ...] = SHAPES,
    *,
    rounds: int = 31,
    slice_seconds: float = 0.03,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tick: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time every attention at every shape (B, H, N, D), forward and forward+backward.

    Args:
        attentions: names or specifications, without groupings.
        rounds: how often each contender takes its turn.
        slice_seconds: how long one turn lasts at least.
        tick: called after each round.
    """
    order = random.Random(0)
    rows = []
    for shape in shapes:
        batch, heads, n, dim = shape
        torch.manual_seed(0)
        # As projections leave them: [B, N, H, D] in memory.
        q, k, v = (
            torch.randn(batch, n, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        fields = contenders(attentions, heads, dim)
        for backward, direction in enumerate(DIRECTIONS):
            for attend in fields.values():  # warm up, and find out how many calls fill a slice
                _time(attend, (q, k, v), bool(backward), 2)
            repeats = max(1, int(slice_seconds / _time(fields[PEER], (q, k, v), bool(backward), 3)))
            times: dict[str, list[float]] = {name: [] for name in fields}
            for _ in range(rounds):
                turn = list(fields)
                order.shuffle(turn)
                for name in turn:
                    times[name].append(_time(fields[name], (q, k, v), bool(backward), repeats))
                tick()
            for name, own in times.items():
                ratios = [a / b for a, b in zip(own, times[PEER], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                rows.append(Timing(shape, direction, name, 1e3 * statistics.median(own), middle, low, high, rounds))
    return rows


def markdown(rows: list[Timing]) -> str:
    """A table for each direction: shapes down, contenders across, each cell a ratio with its spread."""
    names = list(dict.fromkeys(row.contender for row in rows if row.contender != PEER))
    lines = []
    for direction in DIRECTIONS:
        lines += [
            f"### {direction}",
            "",
            f"| (B, H, N, D) | {PEER} | " + " | ".join(names) + " |",
            "|---|---|" + "---|" * len(names),
        ]
        for shape in dict.fromkeys(row.shape for row in rows):
            found = {row.contender: row for row in rows if row.shape == shape and row.direction == direction}
            cells = [f"{found[n].ratio:.3f} ({found[n].ratio_low:.3f}-{found[n].ratio_high:.3f})" for n in names]
            lines.append(f"| {shape} | {found[PEER].milliseconds:.2f} ms | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def run(
    attentions: list[str], out: Path | None, *, threads: int, rounds: int, device: str, dtype: str, command: str
) -> str:
    """Measure, print a progress bar, write ``speed.json`` and ``speed.md`` into `out`; returns the Markdown."""
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in types:
        raise ConfigError(f"--dtype is {dtype!r}; choose from: {', '.join(types)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device is {device!r}, but this torch ({torch.__version__}) sees no GPU")
    torch.set_num_threads(threads)
    keep_freed_memory()
    columns = (TextColumn("speed"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("speed", total=2 * len(SHAPES) * rounds)
        rows = measure(
            attentions, rounds=rounds, device=device, dtype=types[dtype], tick=lambda: progress.advance(task)
        )
    here = machine()
    text = "\n".join(
        [
            "# Speed of attention",
            "",
            f"Command: `{command}`",
            "",
            f"Machine: {', '.join(f'{key} {value}' for key, value in here.items())}; torch {torch.__version__}, "
            f"{threads} threads, {device}, {dtype}.",
            "",
            f"Each cell is the time as a multiple of {PEER} in the same round: the median of {rounds} rounds and, in "
            "brackets, the middle half of them. Contenders take turns in shuffled order. Freed memory stays with the "
            "process, as in a training process with a large heap.",
            "",
            markdown(rows),
        ]
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found = [asdict(row) for row in rows]
        content = {"command": command, "machine": here, "torch": torch.__version__, "threads": threads, "rows": found}
        (out / "speed.json").write_text(json.dumps(content, indent=1))
        (out / "speed.md").write_text(text)
    return text
