"""The time of one decoding step, against scaled_dot_product_attention on preallocated keys."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import quest_core
from quest_core.mechanism import count_kv_heads

from .common import check_calls, measurement
from .speed import make_current

SHAPES = ((1, 8, 64), (8, 8, 64))
"""(B, H, D): one sequence, and a batch of them."""


@dataclass(frozen=True)
class Step:
    """One attention at one shape; times in milliseconds, ratios against the loop by hand in the same round."""

    shape: tuple[int, int, int]
    attention: str
    milliseconds: float
    peer_milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


def by_hand(k: Tensor, v: Tensor, start: int, length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A decoding step written with nothing but PyTorch: k and v [B, G, M, D] of the first `start` tokens."""
    shape = (*k.shape[:2], length, k.shape[3])
    keys, values = k.new_empty(shape), v.new_empty(shape)  # [B, G, length, D]
    keys[:, :, :start], values[:, :, :start] = k, v
    tokens = start

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal tokens
        keys[:, :, tokens : tokens + 1], values[:, :, tokens : tokens + 1] = k, v
        tokens += 1
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, keys[:, :, :tokens], values[:, :, :tokens], enable_gqa=grouped)

    return step


@torch.no_grad()
def measure(
    attentions: list[str],
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    *,
    tokens: int = 8192,
    rounds: int = 100,
    device: str = "cpu",
) -> list[Step]:
    """Time the last `rounds` of `tokens` steps, both contenders in each round, in alternating order."""
    make_current(device)

    def clock() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    rows = []
    for batch, heads, dim in shapes:
        for text in attentions:
            torch.manual_seed(0)
            made = quest_core.Mechanism(text, num_heads=heads, head_dim=dim).eval().to(device)
            groups, start = count_kv_heads(text, heads), tokens - rounds
            q = torch.randn(batch, heads, tokens, dim, device=device)
            k, v = torch.randn(2, batch, groups, tokens, dim, device=device)
            cache = quest_core.Cache(max_length=tokens)
            made.decode(q[:, :, :start], k[:, :, :start], v[:, :, :start], cache)
            by_cache = functools.partial(made.decode, cache=cache)
            steps = (by_hand(k[:, :, :start], v[:, :, :start], start, tokens), by_cache)
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(start, tokens):
                new = [x[:, :, i : i + 1].contiguous() for x in (q, k, v)]
                for turn in (0, 1) if i % 2 else (1, 0):
                    began = clock()
                    steps[turn](*new)
                    times[turn].append(clock() - began)
            warm = rounds // 10
            peer, own = times[0][warm:], times[1][warm:]
            low, middle, high = statistics.quantiles([a / b for a, b in zip(own, peer, strict=True)], n=4)
            medians = 1e3 * statistics.median(own), 1e3 * statistics.median(peer)
            rows.append(Step((batch, heads, dim), text, *medians, middle, low, high))
    return rows


def run(
    attentions: list[str], out: Path | None, *, threads: int, tokens: int, rounds: int, device: str, command: str
) -> str:
    """Measure and write ``decode.json`` and ``decode.md`` into `out`; returns the Markdown."""
    check_calls(attentions, "decode")
    torch.set_num_threads(threads)
    started = time.monotonic()
    rows = measure(attentions, tokens=tokens, rounds=rounds, device=device)
    lines = ["| (B, H, D) | attention | ms | by hand, ms | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = f"{row.ratio:.3f} ({row.ratio_low:.3f}-{row.ratio_high:.3f})"
        cells = (row.shape, row.attention, f"{row.milliseconds:.3f}", f"{row.peer_milliseconds:.3f}", ratio)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    instructions = torch.backends.cpu.get_cpu_capability()
    return measurement(
        "Speed of a decoding step",
        [
            f"A step at {tokens} tokens, as a multiple of scaled_dot_product_attention on views of preallocated keys "
            f"and values in the same round: the median of {rounds} rounds and, in brackets, the middle half of them.",
            "\n".join(lines),
        ],
        command=command,
        seconds=time.monotonic() - started,
        place=f"{instructions}, torch {torch.__version__}, {threads} threads, {device}",
        out=out,
        names=("decode.md", "decode.json"),
        content={
            "instruction_set": instructions,
            "threads": threads,
            "tokens": tokens,
            "rows": list(map(asdict, rows)),
        },
    )
