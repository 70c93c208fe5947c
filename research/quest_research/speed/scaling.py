"""`python -m quest_research.speed scaling`: how time and memory of an attention grow with the length of the sequence.

One call forward and backward at every length, in turns. Exponents are slopes of straight lines through the logarithms,
from 1024 tokens on, where constant costs no longer count.
"""

from __future__ import annotations

import math
import statistics
import sys
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

from .common import check_calls, measurement, start
from .speed import PEER

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_DIM = 4, 64
FIT_FROM = 1024
DEFAULT = "standard,quest,linear,cosine,aft-simple,aft-local(max_length=16384),aft-full(max_length=16384)"

BROADCAST = "broadcast aft-full"
BROADCAST_BYTES = 2**28
"""The largest [T, T, H·D] tensor for which the broadcast formula runs; its backward pass holds several of them."""

Call = Callable[[], None]


def broadcast_aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """σ(q) ⊙ Σ exp(k + w) v / Σ exp(k + w) as it is written down: q, k, v [B, H, T, D], w [T, T] -> [B, H, T, D]."""
    weights = (k.unsqueeze(2) + w[:, :, None]).softmax(3)  # [B, H, T, T', D]
    return torch.sigmoid(q) * (weights * v.unsqueeze(2)).sum(3)


def broadcast_fits(tokens: int) -> bool:
    """Whether `broadcast_aft` may run at this length."""
    return 4 * HEADS * HEAD_DIM * tokens**2 <= BROADCAST_BYTES


@dataclass(frozen=True)
class Point:
    """One contender at one length: seconds (median of the turns) and peak memory in bytes without its inputs."""

    contender: str
    tokens: int
    seconds: float
    low: float
    high: float
    peak_bytes: int


def prepare(name: str, tokens: int) -> Call:
    """A function that attends once, forward and backward, over one sequence."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(1, tokens, HEADS, HEAD_DIM).transpose(1, 2)
    parameters: list[Tensor] = []
    if name == PEER:
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    elif name == BROADCAST:
        parameters = [torch.zeros(tokens, tokens, requires_grad=True)]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return broadcast_aft(q, k, v, parameters[0])

    else:
        attend = quest_core.Mechanism(name, num_heads=HEADS, head_dim=HEAD_DIM)
        parameters = list(attend.parameters())

    def call() -> None:
        attend(q, k, v).backward(grad)
        for x in (q, k, v, *parameters):
            x.grad = None

    return call


def peak_memory(call: Call) -> int:
    """The most bytes that `call` holds at a time, above what was there before, inside operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(names: list[str], lengths: tuple[int, ...], *, budget: float) -> list[Point]:
    """Every contender at every length.

    Args:
        budget: seconds of turns that a contender gets at a length, at least three turns and at most 30.
    """

    def seconds(call: Call) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    points = []
    for tokens in lengths:
        print(f"{tokens} tokens", file=sys.stderr, flush=True)
        calls = {name: prepare(name, tokens) for name in names if name != BROADCAST or broadcast_fits(tokens)}
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
            points.append(Point(name, tokens, middle, low, high, peak_memory(call)))
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


def run(attentions: list[str], out: Path | None, *, threads: int, longest: int, command: str) -> str:
    """Measure; write ``scaling.json``, ``.md`` and ``.png`` into `out`; return the Markdown."""
    lengths = tuple(n for n in LENGTHS if n <= longest)
    if not lengths:
        raise ConfigError(f"--longest is {longest}; the shortest length is {LENGTHS[0]}")
    check_calls(attentions, "scaling")
    start(threads)
    parts = [part for one in attentions for part in quest_core.AttentionConfig.parse(one).components]
    naive = [] if all(part.compares for part in parts) else [BROADCAST]  # the naive form of an AFT
    started = time.monotonic()
    points = measure([PEER, *naive, *attentions], lengths, budget=1.0)
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
        started=started,
        place=f"torch {torch.__version__}, {threads} threads, float32, batch 1, {HEADS} heads of {HEAD_DIM} "
        "features, not causal, forward and backward",
        out=out,
        name="scaling",
        content={"points": [asdict(point) for point in points]},
    )
    if out is not None:
        with whole(out / "scaling.png") as neighbour:
            plot(points, neighbour)
    return text
