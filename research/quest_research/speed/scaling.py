"""`python -m quest_research.speed scaling`: how time and memory of an attention grow with the length of the sequence.

One call forward and backward at every length, in turns. Exponents are slopes of straight lines through the logarithms,
from 1024 tokens on, where constant costs no longer count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import quest_core
from quest_bench.worker import whole
from quest_core.errors import ConfigError
from quest_suites.timing import peak_mib

from .common import check_calls, measurement
from .speed import (
    BROADCAST,
    BROADCAST_BYTES,
    PEER,
    averages,
    broadcast_aft,
    broadcast_fits,
    keep_freed_memory,
    make_current,
    progress_bar,
)

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_DIM = 4, 64
FIT_FROM = 1024
DEFAULT = "standard,quest,linear,cosine,aft-simple,aft-local(max_length=16384),aft-full(max_length=16384)"

Call = Callable[[], None]


@dataclass(frozen=True)
class Point:
    """One contender at one length: seconds (median of the turns) and peak memory in bytes without its inputs."""

    contender: str
    tokens: int
    seconds: float
    low: float
    high: float
    peak_bytes: int


def prepare(name: str, tokens: int, device: str, is_causal: bool) -> Call:
    """A function that attends once, forward and backward, over one sequence."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, HEADS, HEAD_DIM, device=device).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    grad = torch.randn(1, tokens, HEADS, HEAD_DIM, device=device).transpose(1, 2)
    if name == PEER:

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        parameters: list[Tensor] = []
    elif name == BROADCAST:
        parameters = [torch.zeros(tokens, tokens, device=device, requires_grad=True)]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)

        def attend() -> Tensor:
            return broadcast_aft(q, k, v, parameters[0].masked_fill(hidden, -math.inf) if is_causal else parameters[0])

    else:
        made = quest_core.Mechanism(name, num_heads=HEADS, head_dim=HEAD_DIM).to(device)
        parameters = list(made.parameters())

        def attend() -> Tensor:
            return made(q, k, v, is_causal=is_causal)  # type: ignore[no-any-return]

    def call() -> None:
        attend().backward(grad)
        for x in (q, k, v, *parameters):
            x.grad = None

    return call


def peak_memory(call: Call, device: str) -> int:
    """The most bytes that `call` holds at a time, above what was there before, inside operators too."""
    if device.startswith("cuda"):
        return round(2**20 * peak_mib(call))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(
    names: list[str],
    lengths: tuple[int, ...],
    *,
    device: str,
    is_causal: bool,
    budget: float,
    tick: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Every contender at every length.

    Args:
        budget: seconds of turns that a contender gets at a length, at least three turns and at most 30.
    """
    make_current(device)

    def seconds(call: Call) -> float:
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    points = []
    for tokens in lengths:
        calls = {
            name: prepare(name, tokens, device, is_causal)
            for name in names
            if name != BROADCAST or broadcast_fits(1, HEADS, tokens, HEAD_DIM)
        }
        turns = {}
        for name, call in calls.items():
            seconds(call)
            turns[name] = min(30, max(3, int(budget / max(seconds(call), 1e-6))))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(max(turns.values())):
            for name, call in calls.items():
                if turn < turns[name]:
                    times[name].append(seconds(call))
        for name, call in calls.items():
            low, middle, high = statistics.quantiles(times[name], n=4)
            points.append(Point(name, tokens, middle, low, high, peak_memory(call, device)))
            tick()
    return points


def exponent(points: list[Point], value: Callable[[Point], float]) -> float:
    """The slope of log value over log tokens, from FIT_FROM tokens on; NaN for fewer than two lengths."""
    fit = [(math.log(p.tokens), math.log(value(p))) for p in points if p.tokens >= FIT_FROM and value(p) > 0]
    if len(fit) < 2:
        return math.nan
    return statistics.linear_regression([x for x, _ in fit], [y for _, y in fit]).slope


def markdown(points: list[Point]) -> str:
    """A row for each contender: exponents, and time and memory at every length."""
    lengths = sorted({p.tokens for p in points})
    lines = [
        "| attention | time exponent | memory exponent | " + " | ".join(f"T = {n}" for n in lengths) + " |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for name in dict.fromkeys(p.contender for p in points):
        own = {p.tokens: p for p in points if p.contender == name}
        rows = list(own.values())
        fits = (exponent(rows, lambda p: p.seconds), exponent(rows, lambda p: p.peak_bytes))
        cells = [
            f"{1e3 * own[n].seconds:.1f} ms ({1e3 * own[n].low:.1f}-{1e3 * own[n].high:.1f}), "
            f"{own[n].peak_bytes / 2**20:.0f} MiB"
            if n in own
            else "–"
            for n in lengths
        ]
        exponents = ["–" if math.isnan(fit) else f"{fit:.2f}" for fit in fits]
        lines.append(f"| {name} | " + " | ".join([*exponents, *cells]) + " |")
    return "\n".join(lines)


def plot(points: list[Point], path: Path) -> None:
    """Time and memory over length, both axes logarithmic."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4))
    names = list(dict.fromkeys(p.contender for p in points))
    for panel, value, label in (
        (panels[0], lambda p: p.seconds * 1e3, "milliseconds, forward + backward"),
        (panels[1], lambda p: p.peak_bytes / 2**20, "peak memory, MiB"),
    ):
        for index, name in enumerate(names):
            own = [p for p in points if p.contender == name]
            style = {"color": plt.get_cmap("tab10")(index % 10), "marker": "osD^vPX"[index % 7], "markersize": 4}
            panel.plot([p.tokens for p in own], [value(p) for p in own], label=name, **style)
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        panel.set_xticks(sorted({p.tokens for p in points}), [str(n) for n in sorted({p.tokens for p in points})])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def run(
    attentions: list[str], out: Path | None, *, threads: int, longest: int, device: str, is_causal: bool, command: str
) -> str:
    """Measure with a progress bar; write ``scaling.json``, ``.md`` and ``.png``; return the Markdown."""
    lengths = tuple(n for n in LENGTHS if n <= longest)
    if not lengths:
        raise ConfigError(f"--longest is {longest}; the shortest length is {LENGTHS[0]}")
    check_calls(attentions, "scaling", equal_shapes=True)
    torch.set_num_threads(threads)
    keep_freed_memory()
    naive = [BROADCAST] if any(map(averages, attentions)) else []
    names = [PEER, *naive, *attentions]
    started = time.monotonic()
    with progress_bar("scaling") as progress:
        task = progress.add_task("scaling", total=len(names) * len(lengths))
        points = measure(
            names, lengths, device=device, is_causal=is_causal, budget=1.0, tick=lambda: progress.advance(task)
        )
    text = measurement(
        "Time and memory over length",
        [
            f"Each time is the median of 3 to 30 turns, with the middle half of them in brackets. Exponents are fitted "
            f"from {FIT_FROM} tokens on. Memory is the most that one call adds to its "
            "inputs, gradients included."
            + (f" {BROADCAST} runs where its [T, T, d] tensor fits {BROADCAST_BYTES >> 20} MiB." if naive else ""),
            markdown(points),
            "![time and memory over length](scaling.png)",
        ],
        command=command,
        seconds=time.monotonic() - started,
        place=f"torch {torch.__version__}, {threads} threads, {device}, float32, batch 1, {HEADS} heads of {HEAD_DIM} "
        f"features, {'causal' if is_causal else 'not causal'}, forward and backward",
        out=out,
        names=("scaling.md", "scaling.json"),
        content={"points": [asdict(point) for point in points]},
    )
    if out is not None:
        with whole(out / "scaling.png") as neighbour:
            plot(points, neighbour)
    return text
