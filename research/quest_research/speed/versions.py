"""Two versions of quest_core, timed in turns in one run: a ratio for each mechanism, shape and number of threads.

    python -m quest_research.speed.versions ../before/bin/python --out research/results/speed-versions

Each version has an interpreter of its own and takes turns in the same cell, so a machine that slows down for a while
slows both. Processor seconds are counted, because others may use the machine. Both interpreters run this file by its
path and time what it asks on standard input; there it imports only torch and quest_core.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quest_core

SHAPES = (1, 4, 1, 16), (16, 8, 29, 16), (8, 3, 197, 64), (2, 8, 512, 64)  # (B, H, N, D)
MECHANISMS = (
    "standard", "quest", "qnorm", "qknorm", "qknorm-hs", "qknorm-ds", "quest+sigmoid", "quest+sinkhorn",
    "quest+gqa(kv_heads={half})", "quest+kdgqa(kv_heads={half})", "quest+dgqa(kv_heads={half})",
    "quest+pgqa(kv_heads={half})", "linear", "cosine", "aft-simple", "aft-full(max_length={n})",
    "aft-local(max_length={n}, window=16)",
)  # fmt: skip
DECODED = "standard", "quest", "qknorm", "quest+gqa(kv_heads=4)", "linear", "aft-simple"
TRAINED = "standard", "quest", "qknorm-hs", "elliptical", "quest+sigmoid", "linear"


def cells() -> list[dict[str, Any]]:
    """Return every cell: kind, attention, shape (B, H, N, D) and direction."""
    found: list[tuple[str, str, tuple[int, ...], bool]] = [("function", "quest", SHAPES[0], False)]
    for shape, name, backward in itertools.product(SHAPES, MECHANISMS, (False, True)):
        found.append(("module", name.format(half=max(1, shape[1] // 2), n=shape[2]), shape, backward))
    found += [("decode", name, (1, 8, 256, 32), False) for name in DECODED]
    found += [("training", name, (16, 4, 64, 32), True) for name in TRAINED]
    return [dict(zip(("kind", "attention", "shape", "backward"), cell, strict=True)) for cell in found]


def measure(before: str, after: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Time every cell that both versions have, by the interpreters that import them.

    Each row is a cell with the median microseconds of both versions, and the median over the rounds of the time in the
    new version over that in the old one, with the 95 % interval that the order of the rounds gives.
    """
    from quest_suites.timing import in_turns

    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    pipes = [
        subprocess.Popen([python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for python in (before, after)
    ]

    def ask(pipe: Any, cell: dict[str, Any], repeats: int) -> float:
        pipe.stdin.write(json.dumps({"cell": cell, "repeats": repeats}) + "\n")
        pipe.stdin.flush()
        seconds: float = json.loads(pipe.stdout.readline())
        return seconds

    rows = []
    for cell in cells():
        timers = {name: functools.partial(ask, pipe, cell) for name, pipe in zip(("old", "new"), pipes, strict=True)}
        if None in [timed(1) for timed in timers.values()]:
            continue
        times = in_turns(timers, rounds, slice_seconds=0.005)
        low, ratio, high = median([new / old for old, new in zip(times["old"], times["new"], strict=True)])
        old, new = (1e6 * statistics.median(one) for one in times.values())
        rows.append({**cell, "threads": threads, "before": old, "after": new, "low": low, "ratio": ratio, "high": high})
    for pipe in pipes:
        pipe.communicate()
    return rows


def median(values: list[float]) -> tuple[float, float, float]:
    """Return the median between the ends of its 95 % interval, two of the values, by the ranks of the sign test."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor((len(values) - 1) / 2 - half), math.ceil((len(values) - 1) / 2 + half)
    return ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(ordered) - 1)]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: the median times, and the ratio with its interval."""
    lines = [
        "| call | attention | (B, H, N, D) | direction | threads | old µs | new µs | ratio (95 % interval) |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        direction = "forward+backward" if row["backward"] else "forward"
        numbers = "{before:.1f} | {after:.1f} | {ratio:.3f} ({low:.3f} to {high:.3f})".format(**row)
        lines.append(
            f"| {row['kind']} | {row['attention']} | {row['shape']} | {direction} | {row['threads']} | {numbers} |"
        )
    slower, faster = sum(row["low"] > 1.03 for row in rows), sum(row["high"] < 0.97 for row in rows)
    lines.append(f"\nThe interval lies above 1.03 in {slower} of {len(rows)} cells, and below 0.97 in {faster}.")
    return "\n".join(lines)


Call = Callable[[], object]


def call(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a call of a mechanism on q, k, v of one shape (B, H, N, D); G key/value heads if it has a grouping."""
    batch, heads, n, dim = shape
    mechanism = quest_core.Mechanism(attention, num_heads=heads, head_dim=dim).train(backward)
    groups = heads // 2 if "kv_heads" in attention else heads
    q = torch.randn(batch, heads, n, dim, requires_grad=backward)
    k, v = (torch.randn(batch, groups, n, dim, requires_grad=backward) for _ in "kv")

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = mechanism(q, k, v)
        if backward:
            torch.autograd.grad(out, [q, k, v], torch.ones_like(out), allow_unused=True)

    return step


def function(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a call of `quest_core.attention` on q, k, v of one shape (B, H, N, D), without gradients."""
    q, k, v = (torch.randn(shape) for _ in "qkv")
    return lambda: quest_core.attention(q, k, v, attention)


def decode(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a call that fills a cache with N tokens and decodes 32 more, one by one."""
    batch, heads, n, dim = shape
    layer = quest_core.Attention(heads * dim, heads, attention).eval()
    filled, one = torch.randn(batch, n, heads * dim), torch.randn(batch, 1, heads * dim)

    def step() -> None:
        with torch.no_grad():
            cache = quest_core.Cache()
            layer(filled, is_causal=True, cache=cache)
            for _ in range(32):
                layer(one, is_causal=True, cache=cache)

    return step


def training(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a training step of a nn.TransformerEncoder of two layers after `inject`, on B sequences of N tokens."""
    batch, heads, n, dim = shape
    layer = nn.TransformerEncoderLayer(heads * dim, heads, 4 * heads * dim, dropout=0.0, batch_first=True)
    model = quest_core.inject(nn.TransformerEncoder(layer, 2), attention)[0].train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(batch, n, heads * dim)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


KINDS = {"function": function, "module": call, "decode": decode, "training": training}


@functools.lru_cache(1)
def prepared(kind: str, attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call | None:
    """Return a warm call; None if this version refuses it."""
    torch.manual_seed(0)
    try:
        made = KINDS[kind](attention, shape, backward)
        made()
    except Exception as error:
        print(f"{kind} {attention} {shape}: {error!r:.200}", file=sys.stderr)
        return None
    return made


def answer() -> None:
    """Read cells in JSON, one a line, and write the seconds of one call, or null if this version does not have it."""
    with contextlib.suppress(OSError, AttributeError):  # glibc shall keep freed memory, as a training process does
        for threshold in (-1, -3):
            ctypes.CDLL(None).mallopt(threshold, 2**30)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        asked, seconds = json.loads(line), None
        cell = asked["cell"]
        if made := prepared(cell["kind"], cell["attention"], tuple(cell["shape"]), cell["backward"]):
            start = time.process_time()
            for _ in range(asked["repeats"]):
                made()
            seconds = (time.process_time() - start) / asked["repeats"]
        print(json.dumps(seconds), flush=True)


def main(argv: list[str]) -> None:
    """Measure this process's version against another; write versions.md if a folder is given."""
    from quest_bench.store import commit
    from quest_bench.worker import machine, write_text

    parser = argparse.ArgumentParser(prog="python -m quest_research.speed.versions")
    parser.add_argument("before", help="the interpreter that imports the other version")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the page")
    parser.add_argument("--rounds", type=int, default=31, help="turns of each version in each cell")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="of each process")
    given, started = parser.parse_args(argv), time.monotonic()
    rows = [row for count in given.threads for row in measure(given.before, sys.executable, count, given.rounds)]
    seconds, found, here = math.ceil(time.monotonic() - started), commit(), machine()
    threads = ", ".join(map(str, given.threads))
    text = f"""# Two versions of quest_core

Command: `{parser.prog} {shlex.join(argv)}` ({seconds} s), commit {found or "unknown"}.

Machine: {", ".join(f"{key} {value}" for key, value in here.items())}; PyTorch {torch.__version__}, {threads} threads, \
{given.rounds} rounds, processor time.

{table(rows)}
"""
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        write_text(given.out / "versions.md", text)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        answer()
