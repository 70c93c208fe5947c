"""The time of an attention as a ratio to a named peer, measured in the same run.

Contenders take turns, round after round, in a shuffled order. Each round gives one ratio for each of them, so a machine
that slows down for a while slows all of them. Every call gets fresh tensors, as every training step does. Each number
of threads is measured in a process of its own, because compilers and thread pools keep the first number that they see.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import quest_core
from quest_bench.worker import cores, machine
from quest_core.errors import ConfigError, QuestError, one_of

from .common import check_calls, measurement

Attend = Callable[..., Tensor]
Clock = Callable[[], float]
Shape = tuple[int, int, int, int]
Fresh = Callable[[bool], tuple[list[Tensor], list[Tensor], Tensor]]

SHAPES: dict[Shape, float] = {
    (8, 3, 197, 64): 1.10,
    (4, 8, 512, 64): 1.10,
    (1, 8, 2048, 64): 1.10,
    (16, 4, 1024, 16): 1.10,
    (64, 4, 25, 16): 1.40,
    (16, 8, 29, 16): 1.40,
}
"""(B, H, N, D) and quest's ceiling in forward+backward, as a multiple of scaled_dot_product_attention's time.

A ViT's tokens, two lengths of language models, point-cloud patches, small graphs, time series.
"""

LINEAR_SHAPE: Shape = (1, 8, 16384, 64)

PEER = "scaled_dot_product_attention"
FORMULA = "three-line quest"
NAIVE = "naive linear"
FLEX = "FlexAttention"
BROADCAST = "broadcast aft-full"
LAYER_PEER = "nn.MultiheadAttention"
ALSO = (FLEX, LAYER_PEER)
DIRECTIONS = ("forward", "forward+backward")
LAYOUTS = ("contiguous", "packed")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BROADCAST_BYTES = 2**28
"""The largest [B, T, T, d] tensor for which the broadcast formula runs; its backward pass holds several of them."""


def three_lines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """QUEST as a user would write it: [B, H, N, D] each -> [B, H, N, D]."""
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, scale=1.0)


def naive_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as a user would write it: [B, H, N, D] each -> [B, H, N, D]."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weight = q @ k.sum(2, keepdim=True).mT  # [B, H, N, 1]
    return q @ (k.mT @ v) / weight


def broadcast_aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """σ(q) ⊙ Σ exp(k + w) v / Σ exp(k + w) as it is written down: q, k, v [B, H, T, D], w [T, T] -> [B, H, T, D]."""
    weights = (k.unsqueeze(2) + w[:, :, None]).softmax(3)  # [B, H, T, T', D]
    return torch.sigmoid(q) * (weights * v.unsqueeze(2)).sum(3)


def averages(attention: quest_core.AttentionSpec) -> bool:
    """Return whether queries do not meet keys in an attention, so that `broadcast_aft` is the naive form of it."""
    return not any(part.compares for part in quest_core.AttentionConfig.parse(attention).components)


def broadcast_fits(batch: int, heads: int, n: int, dim: int) -> bool:
    """Whether `broadcast_aft` may run at this shape."""
    return 4 * batch * heads * n * n * dim <= BROADCAST_BYTES


class SelfAttention(nn.Module):
    """A layer with projections, called with its tokens [B, N, E] only."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer.eval()  # without dropout training is the same, but PyTorch's fast path is not

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        attentions: names or specifications, of which `check_calls` refuses some.
        also: further contenders, of ALSO.
        layouts: of LAYOUTS.
        shapes: (B, H, N, D) -> quest's ceiling there.
        linear_shape: where linear attention is compared with its naive formula.
        rounds: how often each contender takes its turn, at least 2.
        slice_seconds: how long one turn lasts at least.
        device: cpu, cuda or cuda:N.
        dtype: of TYPES.
        cpu_time: count the processor's seconds in place of elapsed ones.
    """

    attentions: tuple[str, ...] = ("quest", "standard")
    also: tuple[str, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    shapes: dict[Shape, float] = field(default_factory=lambda: dict(SHAPES))
    linear_shape: Shape = LINEAR_SHAPE
    rounds: int = 31
    slice_seconds: float = 0.03
    device: str = "cpu"
    dtype: str = "float32"
    cpu_time: bool = False

    def __post_init__(self) -> None:
        for option, given, choices in (
            ("--also", self.also, ALSO),
            ("--layouts", self.layouts, LAYOUTS),
            ("--dtype", (self.dtype,), tuple(TYPES)),
        ):
            for one in given:
                if one not in choices:
                    raise ConfigError(f"{option} is {one!r}; {one_of(one, choices)}")
        check_calls(self.attentions, "speed", equal_shapes=True)

    def smoke(self) -> Plan:
        """The same at small sizes, for seconds; the numbers mean nothing."""
        shapes = {(max(1, b // 4), h, max(8, n // 8), d): ceiling for (b, h, n, d), ceiling in self.shapes.items()}
        return replace(self, shapes=shapes, linear_shape=(1, 8, 512, 64), rounds=2, slice_seconds=0.0)

    def races(self) -> list[tuple[str, Shape, str]]:
        """Every (peer, shape, layout) to measure."""
        found = [(PEER, shape, layout) for shape, layout in itertools.product(self.shapes, self.layouts)]
        found += [(NAIVE, self.linear_shape, layout) for layout in self.layouts]
        return found + [(LAYER_PEER, shape, "tokens") for shape in self.shapes if LAYER_PEER in self.also]


@dataclass(frozen=True)
class Timing:
    """One contender in one direction: milliseconds (median), and the ratio to `peer` (median, middle half)."""

    shape: Shape
    layout: str
    threads: int
    direction: str
    peer: str
    contender: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def contenders(plan: Plan, peer: str, shape: Shape) -> dict[str, Attend]:
    """Return the contenders at a shape (B, H, N, D); `peer` is the first.

    Beside scaled_dot_product_attention: quest in three lines, every attention through quest_core, FlexAttention if the
    plan has it, and the broadcast formula if an AFT is among the attentions. Beside nn.MultiheadAttention, which
    projects its inputs: quest_core's MultiheadAttention with every attention.
    """
    _, heads, n, dim = shape
    place: dict[str, Any] = {"device": plan.device, "dtype": TYPES[plan.dtype]}
    configs = list(map(quest_core.AttentionConfig.parse, plan.attentions))
    if peer == LAYER_PEER:
        layers: dict[str, nn.MultiheadAttention] = {
            LAYER_PEER: nn.MultiheadAttention(heads * dim, heads, batch_first=True)
        }
        for config in configs:
            layer = quest_core.MultiheadAttention(heads * dim, heads, batch_first=True, attention=config)
            layers[f"{config} in MultiheadAttention"] = layer
        return {name: SelfAttention(layer).to(**place) for name, layer in layers.items()}

    def made(attention: Any) -> quest_core.Mechanism:
        return quest_core.Mechanism(attention, num_heads=heads, head_dim=dim).to(**place)

    if peer == NAIVE:
        return {NAIVE: naive_linear, "linear": made("linear")}
    found: dict[str, Attend] = {PEER: F.scaled_dot_product_attention, FORMULA: three_lines}
    if FLEX in plan.also:
        from torch.nn.attention.flex_attention import flex_attention

        found[FLEX] = torch.compile(flex_attention, dynamic=False)
    if any(map(averages, configs)) and broadcast_fits(*shape):
        w = torch.zeros(n, n, **place)
        found[BROADCAST] = lambda q, k, v: broadcast_aft(q, k, v, w)
    return {**found, **{str(config): made(config) for config in configs}}


def fresh(layout: str, shape: Shape, device: str, dtype: torch.dtype) -> Fresh:
    """Return a function that makes new inputs: (with gradients?) -> (leaves, arguments, gradient of the output).

    Args:
        layout: "contiguous": q, k and v [B, H, N, D] are leaves. "packed": q, k and v are views of one leaf
            [B, N, 3·H·D], as a packed projection returns it. "tokens": one leaf [B, N, H·D] for a layer.
        shape: (B, H, N, D).
    """
    batch, heads, n, dim = shape
    torch.manual_seed(0)
    gradient = torch.randn(batch, n, heads, dim, device=device, dtype=dtype)
    stored = torch.randn(3, batch, heads, n, dim, device=device, dtype=dtype)

    def make(backward: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        if layout == "contiguous":
            leaves = [x.clone().requires_grad_(backward) for x in stored]
            return leaves, leaves, gradient.clone().transpose(1, 2)
        if layout == "packed":
            leaf = stored.clone().view(batch, n, 3 * heads * dim).requires_grad_(backward)
            q, k, v = leaf.unflatten(2, (3, heads, dim)).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
            return [leaf], [q, k, v], gradient.clone().transpose(1, 2)
        leaf = stored[0].clone().view(batch, n, heads * dim).requires_grad_(backward)
        return [leaf], [leaf], gradient.flatten(2).clone()

    return make


def _time(attend: Attend, make: Fresh, backward: bool, repeats: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of one call with fresh tensors, the mean of `repeats` calls; making the tensors does not count."""
    parameters = list(attend.parameters()) if isinstance(attend, nn.Module) else []
    total = 0.0
    for _ in range(repeats):
        leaves, arguments, gradient = make(backward)
        wait = torch.cuda.synchronize if gradient.is_cuda else lambda: None
        wait()
        start = clock()
        with torch.set_grad_enabled(backward):
            out = attend(*arguments)
        if backward:
            torch.autograd.grad(out, [*leaves, *parameters], gradient, allow_unused=True)
        wait()
        total += clock() - start
        del out
    return total / repeats


def make_current(device: str) -> None:
    """Make a GPU, "cuda:N", the one that torch.cuda synchronizes and counts the memory of."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory.

    Without it a process that holds little else gives every freed tensor back to the system and faults it in again,
    page by page, at the next call: up to 600 faults for one tensor of 1 MB, more than the attention itself takes.
    A training process, whose heap is large, does not do that. Without glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**30)
        mallopt(mmap_threshold, 2**30)


def measure(plan: Plan, threads: int, tick: Callable[[], None] = lambda: None) -> tuple[list[Timing], dict[str, str]]:
    """Time every contender, in this process and with its number of threads.

    Args:
        plan: what to measure.
        threads: the number of threads of this process, which the rows record.
        tick: called after every race, twice for each of `plan.races()`.

    Returns:
        The rows, and why contenders were left out: {contender and direction: error}.
    """
    make_current(plan.device)
    clock = time.process_time if plan.cpu_time else time.perf_counter
    order = random.Random(0)
    rows: list[Timing] = []
    left_out: dict[str, str] = {}
    for peer, shape, layout in plan.races():
        make = fresh(layout, shape, plan.device, TYPES[plan.dtype])
        for backward, direction in enumerate(DIRECTIONS):
            able = {}
            for name, attend in contenders(plan, peer, shape).items():
                try:
                    _time(attend, make, bool(backward), 2)  # warm up
                    able[name] = attend
                except Exception as error:  # a compiler may fail in any way
                    if name != FLEX:
                        raise
                    left_out[f"{name}, {direction}"] = f"{error!r:.200}"
            repeats = max(1, int(plan.slice_seconds / _time(able[peer], make, bool(backward), 2)))
            times: dict[str, list[float]] = {name: [] for name in able}
            turn = list(able)
            for _ in range(plan.rounds):
                order.shuffle(turn)
                for name in turn:
                    times[name].append(_time(able[name], make, bool(backward), repeats, clock))
            pairs = [(peer, name) for name in able] + [(FORMULA, "quest")] * ({FORMULA, "quest"} <= able.keys())
            for base, name in pairs:
                ratios = [own / other for own, other in zip(times[name], times[base], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                median = 1e3 * statistics.median(times[name])
                where = (shape, layout, threads, direction, base, name)
                rows.append(Timing(*where, median, middle, low, high, plan.rounds))
            tick()
    return rows, left_out


def _child(pipe: Connection, plan: Plan, threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    try:
        pipe.send(measure(plan, threads, tick=lambda: pipe.send(None)))
    except QuestError as error:
        pipe.send(error)


def measure_apart(plan: Plan, threads: int, tick: Callable[[], None]) -> tuple[list[Timing], dict[str, str]]:
    """`measure` in a new process that has `threads` threads from its start.

    Raises:
        QuestError: an attention refused its inputs, or the process died, and its own output says why.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(there, plan, threads), daemon=True)
    child.start()
    there.close()
    try:
        while (found := here.recv()) is None:
            tick()
    except EOFError:
        child.join()
        raise QuestError(f"the process that measures {threads} threads ended with {child.exitcode}") from None
    child.join()
    if isinstance(found, QuestError):
        raise found
    return found  # type: ignore[no-any-return]


def progress_bar(name: str) -> Progress:
    """A bar on standard error, so that standard output holds only the report."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


# --- the report -------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the conditions of the times: processor, its instruction set in PyTorch, PyTorch."""
    instructions = torch.backends.cpu.get_cpu_capability()
    forced = os.environ.get("ATEN_CPU_CAPABILITY")
    return {
        "cpu": machine()["cpu"],
        "instruction_set": f"{instructions} (ATEN_CPU_CAPABILITY={forced})" if forced else instructions,
        "torch": torch.__version__,
    }


def markdown(rows: list[Timing], place: str) -> str:
    """A table for each direction and peer: shapes, layouts and threads down, contenders across, `place` above."""
    lines = []
    for direction, peer in itertools.product(DIRECTIONS, (PEER, NAIVE, LAYER_PEER)):
        own = [row for row in rows if row.peer == peer and row.direction == direction]
        if not own:
            continue
        names = list(dict.fromkeys(row.contender for row in own if row.contender != peer))
        lines += [
            f"### {direction}, against {peer}",
            "",
            f"{place}.",
            "",
            f"| (B, H, N, D) | layout | threads | {peer} | " + " | ".join(names) + " |",
            "|---|---|---:|---:|" + "---|" * len(names),
        ]
        for where in dict.fromkeys((row.shape, row.layout, row.threads) for row in own):
            found = {row.contender: row for row in own if (row.shape, row.layout, row.threads) == where}
            cells = [_cell(found[name]) if name in found else "–" for name in names]
            first = f"{where[0]} | {where[1]} | {where[2]} | {found[peer].milliseconds:.3f} ms"
            lines.append(f"| {first} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: Timing) -> str:
    return f"{row.ratio:.3f} ({row.ratio_low:.3f}-{row.ratio_high:.3f})"


def ceiling(row: Timing, shapes: dict[Shape, float]) -> float | None:
    """The ceiling of a row's ratio, or None if it has none: all are of forward+backward."""
    if row.direction != "forward+backward":
        return None
    if (row.contender, row.peer) == ("quest", PEER):
        return shapes[row.shape]
    return {("quest", FORMULA): 1.0, ("standard", PEER): 1.02, ("linear", NAIVE): 1.0}.get((row.contender, row.peer))


def within(row: Timing, limit: float) -> bool:
    """Whether the median is at most the ceiling; against the three lines, whether the lower quartile is."""
    return (row.ratio_low if row.peer == FORMULA else row.ratio) <= limit


def ceilings_markdown(rows: list[Timing], shapes: dict[Shape, float], place: str) -> str:
    """A row for each contender, peer and shape; layouts and threads across; each cell "within" or "over"."""
    limits = {row: limit for row in rows if (limit := ceiling(row, shapes)) is not None}
    runs = list(dict.fromkeys((row.layout, row.threads) for row in limits))
    lines = [
        "## Ceilings of forward+backward",
        "",
        f"{place}. Each cell is the median ratio, which is compared with the ceiling; against {FORMULA} the lower end "
        "of the middle half is compared, so that only a difference beyond the spread counts. "
        f"{sum(within(*pair) for pair in limits.items())} of {len(limits)} are within.",
        "",
        "| contender | against | (B, H, N, D) | at most | "
        + " | ".join(f"{layout}, {threads} thread{'s' * (threads > 1)}" for layout, threads in runs)
        + " |",
        "|---|---|---|---:|" + "---|" * len(runs),
    ]
    for key in dict.fromkeys((row.contender, row.peer, row.shape) for row in limits):
        found = {(row.layout, row.threads): row for row in limits if (row.contender, row.peer, row.shape) == key}
        limit = limits[next(iter(found.values()))]
        cells = [
            f"{found[run].ratio:.3f} {'within' if within(found[run], limit) else '**over**'}" if run in found else "–"
            for run in runs
        ]
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {limit:.2f} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def check_threads(given: list[int] | None) -> list[int]:
    """The numbers of threads to measure; without any, those of 1, 2 and 4 that this machine has cores for.

    Raises:
        ConfigError: a number is below 1 or above the number of cores.
    """
    here = cores()
    for threads in given or ():
        if not 1 <= threads <= here:
            raise ConfigError(f"--threads has {threads}; this process may use 1 to {here} cores")
    return given or [threads for threads in (1, 2, 4) if threads <= here]


def run(plan: Plan, out: Path | None, *, threads: list[int] | None, command: str) -> str:
    """Measure, show a progress bar, write ``speed.md`` and ``speed.json`` into `out`; returns the report.

    Raises:
        ConfigError: a number of threads that this machine does not have, or `cpu_time` with more than one.
    """
    numbers = check_threads(threads)
    if plan.cpu_time and (plan.device != "cpu" or numbers != [1]):
        raise ConfigError(
            f"--cpu-time counts the processor's work, which is the time only for --device cpu --threads 1; these are "
            f"{plan.device!r} and {','.join(map(str, numbers))}"
        )
    rows: list[Timing] = []
    left_out: dict[str, str] = {}
    started = time.monotonic()
    with progress_bar("speed") as progress:
        task = progress.add_task("speed", total=len(DIRECTIONS) * len(plan.races()) * len(numbers))
        for number in numbers:
            found, missing = measure_apart(plan, number, lambda: progress.advance(task))
            rows += found
            left_out |= missing
    rows.sort(key=lambda row: [*plan.shapes, plan.linear_shape].index(row.shape))
    facts = environment()
    place = f"{facts['cpu']}, {facts['instruction_set']}, torch {facts['torch']}, {plan.device}, {plan.dtype}"
    paragraphs = [
        f"Each cell is the {'processor ' if plan.cpu_time else ''}time as a multiple of the peer's in the same round: "
        f"the median of {plan.rounds} rounds and, in brackets, the middle half of them. Contenders take turns in "
        "shuffled order, and every call gets fresh tensors. Layout contiguous: q, k, v of shape [B, H, N, D]. Layout "
        "packed: views of one projection [B, N, 3·H·D], to which the gradient flows. Freed memory stays with the "
        "process, as in a training process with a large heap.",
        "\n".join(f"Left out: {name} ({why})." for name, why in left_out.items()),
        ceilings_markdown(rows, plan.shapes, place),
        "## Times",
        markdown(rows, place),
    ]
    records = [
        {**facts, **asdict(row), "ceiling": limit, "within": None if limit is None else within(row, limit)}
        for row in rows
        for limit in [ceiling(row, plan.shapes)]
    ]
    return measurement(
        "Speed of attention",
        paragraphs,
        command=command,
        seconds=time.monotonic() - started,
        place=place,
        out=out,
        names=("speed.md", "speed.json"),
        content={"rows": records, "device": plan.device, "dtype": plan.dtype, "left_out": left_out},
    )
