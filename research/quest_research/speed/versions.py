"""Two versions of quest_core, timed in turns in one run: a ratio for each mechanism, shape and number of threads.

Each version has an interpreter of its own and takes turns in the same cell, so a machine that slows down for a while
slows both. Processor seconds are counted, because others may use the machine.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .common import measurement

SHAPES = (1, 4, 1, 16), (16, 8, 29, 16), (8, 3, 197, 64), (2, 8, 512, 64)  # (B, H, N, D)
MECHANISMS = (
    "standard", "quest", "qnorm", "qknorm", "qknorm-hs", "qknorm-ds", "quest+sigmoid", "quest+sinkhorn",
    "quest+gqa(kv_heads={half})", "quest+kdgqa(kv_heads={half})", "quest+dgqa(kv_heads={half})",
    "quest+pgqa(kv_heads={half})", "linear", "cosine", "aft-simple", "aft-full(max_length={n})",
    "aft-local(max_length={n}, window=16)",
)  # fmt: skip
DECODED = "standard", "quest", "qknorm", "quest+gqa(kv_heads=4)", "linear", "aft-simple"
TRAINED = "standard", "quest", "qknorm-hs", "elliptical", "quest+sigmoid", "linear"


@dataclass(frozen=True)
class Ratio:
    """The time of one cell in the new version over that in the old one: median and middle half of the rounds."""

    kind: str
    attention: str
    shape: tuple[int, ...]
    backward: bool
    threads: int
    before: float  # microseconds
    after: float
    low: float
    ratio: float
    high: float


def cells() -> list[dict[str, Any]]:
    """Return every cell: kind, attention, shape (B, H, N, D) and direction."""
    found: list[tuple[str, str, tuple[int, ...], bool]] = [("function", "quest", SHAPES[0], False)]
    for shape, name, backward in itertools.product(SHAPES, MECHANISMS, (False, True)):
        found.append(("module", name.format(half=max(1, shape[1] // 2), n=shape[2]), shape, backward))
    found += [("decode", name, (1, 8, 256, 32), False) for name in DECODED]
    found += [("training", name, (16, 4, 64, 32), True) for name in TRAINED]
    return [dict(zip(("kind", "attention", "shape", "backward"), cell, strict=True)) for cell in found]


def measure(before: str, after: str, threads: int, rounds: int) -> list[Ratio]:
    """Time every cell that both versions have.

    Args:
        before, after: interpreters that import the two versions.
        threads: of each process.
        rounds: turns of each version in each cell.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    script = str(Path(__file__).with_name("turns.py"))
    pipes = [
        subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for python in (before, after)
    ]

    def ask(which: int, cell: dict[str, Any], repeats: int | None) -> tuple[float | None, int]:
        pipe = pipes[which]
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        pipe.stdin.write(json.dumps({"cell": cell, "repeats": repeats}) + "\n")
        pipe.stdin.flush()
        seconds, count = json.loads(pipe.stdout.readline())
        return seconds, count

    rows = []
    for cell in cells():
        first, repeats = ask(0, cell, None)
        if None in (first, ask(1, cell, repeats)[0]):
            continue
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(ask(which, cell, repeats)[0] or 0.0)
        ratios = [new / old for old, new in zip(*times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        old, new = (1e6 * statistics.median(one) for one in times)
        rows.append(Ratio(**cell, threads=threads, before=old, after=new, low=low, ratio=middle, high=high))
    for pipe in pipes:
        pipe.communicate()
    return rows


def table(rows: list[Ratio]) -> str:
    """Return a Markdown table: the ratio and its middle half, and the median times."""
    lines = [
        "| call | attention | (B, H, N, D) | direction | threads | before µs | after µs | ratio (middle half) |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        direction = "forward+backward" if row.backward else "forward"
        lines.append(
            f"| {row.kind} | {row.attention} | {row.shape} | {direction} | {row.threads} | {row.before:.1f} | "
            f"{row.after:.1f} | {row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}) |"
        )
    slower = sum(row.low > 1.03 for row in rows)
    return "\n".join([*lines, "", f"{slower} of {len(rows)} cells are more than 3 % slower beyond their middle half."])


def run(before: str, out: Path | None, *, threads: list[int], rounds: int, command: str) -> str:
    """Measure and return the report, written as versions.md and versions.json if `out` is given.

    Args:
        before: the interpreter that imports the old version; this process's own imports the new one.
        out: a folder.
        threads: each number of threads gets processes of its own.
        rounds: turns of each version in each cell.
        command: what was typed.
    """
    started = time.monotonic()
    rows = [row for number in threads for row in measure(before, sys.executable, number, rounds)]
    return measurement(
        "Two versions of quest_core",
        [table(rows)],
        command=command,
        started=started,
        place=f"PyTorch {torch.__version__}, {', '.join(map(str, threads))} threads, {rounds} rounds, processor time",
        out=out,
        name="versions",
        content={"rows": list(map(asdict, rows))},
    )
