"""`quest bench speed`: how much time an attention takes, as a ratio against a named peer measured in the same run.

Contenders take turns, round after round, in a shuffled order; each round gives one ratio for each of them, so a machine
that slows down for a while slows all of them. What is reported is the median ratio and the middle half of the rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
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
Clock = Callable[[], float]

SHAPES = ((8, 3, 197, 64), (4, 8, 512, 64), (1, 8, 2048, 64), (64, 4, 25, 16), (16, 4, 1024, 16))
"""(B, H, N, D): a ViT's tokens, two language-model lengths, small graphs, point-cloud patches."""

PEER = "scaled_dot_product_attention"
FORMULA = "three-line quest"
FLEX = "FlexAttention"
BROADCAST = "broadcast aft-full"
LAYER_PEER = "nn.MultiheadAttention"
DIRECTIONS = ("forward", "forward+backward")
BROADCAST_BYTES = 2**28
"""The broadcast formula takes its turn where its [B, T, T, d] tensor is no larger: its backward pass holds several."""

ABSENT = (
    f"– where a contender cannot run: {FLEX} has no backward pass on a CPU, and {BROADCAST} would need a tensor "
    f"[B, T, T, d] of more than {BROADCAST_BYTES >> 20} MiB."
)


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, scale=1.0)


def broadcast_aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """σ(q) ⊙ Σ exp(k + w) v / Σ exp(k + w) as it is written down: q, k, v [B, H, T, D], w [T, T] -> [B, H, T, D]."""
    weights = (k.unsqueeze(2) + w[:, :, None]).softmax(3)  # [B, H, T, T', D]
    return torch.sigmoid(q) * (weights * v.unsqueeze(2)).sum(3)


def broadcast_fits(batch: int, heads: int, n: int, dim: int) -> bool:
    """Whether `broadcast_aft` may run at this shape."""
    return 4 * batch * heads * n * n * dim <= BROADCAST_BYTES


def _flex() -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # On a CPU it refuses inputs that require gradients, also where none are computed.
        given = (q, k, v) if torch.is_grad_enabled() else (q.detach(), k.detach(), v.detach())
        return compiled(*given)  # type: ignore[no-any-return]

    return attend


@dataclass(frozen=True)
class Timing:
    """One contender at one shape in one direction; times in milliseconds, ratios against `peer`."""

    shape: tuple[int, int, int, int]
    direction: str
    peer: str
    contender: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def contenders(
    attentions: list[str], shape: tuple[int, int, int, int], *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Attend]]:
    """What runs at a shape (B, H, N, D), by the peer it is compared with.

    Beside scaled_dot_product_attention: quest as a user would write it, FlexAttention, the broadcast formula if an AFT
    is among the attentions, and every attention through quest_core. Beside nn.MultiheadAttention, which projects
    its inputs: quest_core's MultiheadAttention with every attention.
    """
    _, heads, n, dim = shape
    alone: dict[str, Attend] = {PEER: F.scaled_dot_product_attention, FORMULA: _formula, FLEX: _flex()}
    configs = [quest_core.AttentionConfig.parse(text) for text in attentions]
    if any((config.family or "").startswith("aft") for config in configs) and broadcast_fits(*shape):
        w = torch.zeros(n, n, device=device, dtype=dtype)
        alone[BROADCAST] = lambda q, k, v: broadcast_aft(q, k, v, w)
    layers = {LAYER_PEER: _layer(torch.nn.MultiheadAttention(heads * dim, heads, batch_first=True), device, dtype)}
    for config in configs:
        if config.family is None and config["grouping"] != "mha":
            raise ConfigError(f"attention '{config}': speed compares equal shapes, and a grouping has fewer keys")
        if any(part.learnable for part in config.specs()):
            made = quest_core.Mechanism(config, num_heads=heads, head_dim=dim)
            alone[str(config)] = made.to(device=device, dtype=dtype)
        else:
            alone[str(config)] = lambda q, k, v, config=config: quest_core.attention(q, k, v, config)  # type: ignore[misc]
        layer = quest_core.MultiheadAttention(heads * dim, heads, batch_first=True, attention=config)
        layers[f"{config} in MultiheadAttention"] = _layer(layer, device, dtype)
    return {PEER: alone, LAYER_PEER: layers}


def _layer(module: torch.nn.MultiheadAttention, device: str, dtype: torch.dtype) -> Attend:
    """Self-attention of a layer over the tokens that the queries are, [B, H, N, D] read as [B, N, H·D]."""
    module.to(device=device, dtype=dtype).eval()  # without dropout training is the same, but PyTorch's fast path is not

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q.transpose(1, 2).flatten(2)
        return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    return attend


def _able(fields: dict[str, dict[str, Attend]], run: Callable[[Attend], object], backward: bool, cuda: bool) -> None:
    """Warm up; take out what cannot run here, and say why where that is news."""
    for field in fields.values():
        for name, attend in list(field.items()):
            if name == FLEX and backward and not cuda:
                del field[name]
                continue
            try:
                run(attend)
            except Exception as error:  # a compiler may fail in any way
                if name != FLEX:
                    raise
                del field[name]
                Console(stderr=True).print(f"{FLEX} is left out: {error!r:.300}", markup=False)


def _time(
    attend: Attend,
    tensors: tuple[Tensor, Tensor, Tensor],
    backward: bool,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds for one call."""
    cuda = tensors[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = clock()
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
    return (clock() - start) / repeats


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
    clock: Clock = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time every attention at every shape (B, H, N, D), forward and forward+backward.

    Args:
        attentions: names or specifications, without groupings.
        rounds: how often each contender takes its turn.
        slice_seconds: how long one turn lasts at least.
        clock: what tells the seconds: elapsed time or the processor's.
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
        for backward, direction in enumerate(DIRECTIONS):
            fields = contenders(attentions, shape, device=device, dtype=dtype)
            _able(fields, lambda attend: _time(attend, (q, k, v), bool(backward), 2), bool(backward), q.is_cuda)  # noqa: B023
            repeats = max(1, int(slice_seconds / _time(fields[PEER][PEER], (q, k, v), bool(backward), 3)))
            turn = [(peer, name) for peer, field in fields.items() for name in field]
            times: dict[tuple[str, str], list[float]] = {place: [] for place in turn}
            for _ in range(rounds):
                order.shuffle(turn)
                for peer, name in turn:
                    times[peer, name].append(_time(fields[peer][name], (q, k, v), bool(backward), repeats, clock))
                tick()
            for (peer, name), own in times.items():
                ratios = [a / b for a, b in zip(own, times[peer, peer], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                median = 1e3 * statistics.median(own)
                rows.append(Timing(shape, direction, peer, name, median, middle, low, high, rounds))
    return rows


def markdown(rows: list[Timing]) -> str:
    """A table for each direction and peer: shapes down, contenders across, each cell a ratio with its spread."""
    lines = []
    for direction, peer in itertools.product(DIRECTIONS, (PEER, LAYER_PEER)):
        own = [row for row in rows if row.peer == peer and row.direction == direction]
        names = list(dict.fromkeys(row.contender for row in own if row.contender != peer))
        lines += [
            f"### {direction}, beside {peer}",
            "",
            f"| (B, H, N, D) | {peer} | " + " | ".join(names) + " |",
            "|---|---|" + "---|" * len(names),
        ]
        for shape in dict.fromkeys(row.shape for row in own):
            found = {row.contender: row for row in own if row.shape == shape}
            cells = [_cell(found.get(name)) for name in names]
            lines.append(f"| {shape} | {found[peer].milliseconds:.2f} ms | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: Timing | None) -> str:
    return "–" if row is None else f"{row.ratio:.3f} ({row.ratio_low:.3f}-{row.ratio_high:.3f})"


def run(
    attentions: list[str],
    out: Path | None,
    *,
    threads: int,
    rounds: int,
    device: str,
    dtype: str,
    cpu_time: bool,
    command: str,
) -> str:
    """Measure, print a progress bar, write ``speed.json`` and ``speed.md`` into `out`; returns the Markdown."""
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in types:
        raise ConfigError(f"--dtype is {dtype!r}; choose from: {', '.join(types)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device is {device!r}, but this torch ({torch.__version__}) sees no GPU")
    if cpu_time and (device != "cpu" or threads != 1):
        raise ConfigError(
            f"--cpu-time counts the processor's work, which is the time only for --device cpu --threads 1; these are "
            f"{device!r} and {threads}"
        )
    torch.set_num_threads(threads)
    keep_freed_memory()
    columns = (TextColumn("speed"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("speed", total=2 * len(SHAPES) * rounds)
        rows = measure(
            attentions,
            rounds=rounds,
            device=device,
            dtype=types[dtype],
            clock=time.process_time if cpu_time else time.perf_counter,
            tick=lambda: progress.advance(task),
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
            f"Each cell is the {'processor ' if cpu_time else ''}time as a multiple of the peer's in the same round: "
            f"the median of {rounds} rounds and, in brackets, the middle half of them. Contenders take turns in "
            "shuffled order. Freed memory stays with the process, as in a training process with a large heap. "
            f"Beside {LAYER_PEER} all have its projections. {ABSENT}",
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
