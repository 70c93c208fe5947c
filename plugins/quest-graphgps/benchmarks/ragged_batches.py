"""Time packing: one attention layer, forward and backward, padded and packed, on a CPU core.

python plugins/quest-graphgps/benchmarks/ragged_batches.py            writes a table
python plugins/quest-graphgps/benchmarks/ragged_batches.py --rule     the same along the ratio of areas, for the rule

Three layers take turns in an order that is drawn again for every round: the host's own (torch.nn.MultiheadAttention,
on padded batches, as in PyTorch Geometric and GraphGPS), the chosen attention on padded batches, and ours, which packs
ragged ones. Times are CPU seconds of this process, so that other processes on the machine count less.
Two layers are compared by the median over rounds of their ratio within a round, with the 95 % interval of that median
(by ranks).
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import statistics
import time

import torch
from torch import Tensor, nn

from quest_core import MultiheadAttention
from quest_graphgps import attention
from quest_graphgps.attention import GraphAttention

WIDTH, HEADS = 64, 4
WARM_UP, LEAST = 2, 8
"""Rounds that are not counted, and the fewest that are."""


def batches() -> dict[str, list[int]]:
    """Nodes of the graphs in a batch."""
    generator = torch.Generator().manual_seed(0)

    def normal(mean: float, spread: float, least: int, most: int) -> list[int]:
        drawn = torch.randn(32, generator=generator) * spread + mean
        return [int(n) for n in drawn.clamp(least, most)]

    return {
        "one of 2000 nodes, 31 of 50": [2000] + [50] * 31,
        "one of 1000 nodes, 31 of 50": [1000] + [50] * 31,
        "ZINC-like (23 ± 4.5 nodes)": normal(23, 4.5, 9, 37),
        "PATTERN-like (119 ± 25 nodes)": normal(119, 25, 44, 188),
        "molecules and one peptide of 150": [150, *normal(23, 4.5, 9, 37)[1:]],
        "Peptides-like (151 ± 84 nodes)": normal(151, 84, 8, 444),
    }


def ratio(sizes: list[int]) -> float:
    """Padded over real area."""
    return len(sizes) * max(sizes) ** 2 / sum(n * n for n in sizes)


def milliseconds(sizes: list[int], name: str, dropout: float, seconds: float) -> tuple[dict[str, list[float]], bool]:
    """CPU milliseconds of the three layers on such a batch, round by round, and whether ours packs it."""
    torch.manual_seed(0)
    host = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
    layers = {
        "host": host,
        "padded": MultiheadAttention.from_torch(host, name),
        "ours": GraphAttention.from_torch(host, name),
    }
    hidden = torch.arange(max(sizes)) >= torch.tensor(sizes)[:, None]  # [B, N]
    x = torch.zeros(*hidden.shape, WIDTH)
    x[~hidden] = torch.randn(sum(sizes), WIDTH)
    times: dict[str, list[float]] = {which: [] for which in layers}
    draw = random.Random(0)
    began = time.process_time()
    for turn in itertools.count():
        for which in draw.sample(list(layers), len(layers)):
            start = time.process_time()
            step(layers[which], x, hidden)
            if turn >= WARM_UP:
                times[which].append(1e3 * (time.process_time() - start))
        if turn >= WARM_UP + LEAST and time.process_time() - began > seconds:
            return times, attention.ragged_plan(hidden) is not None
    raise AssertionError("unreachable")


def paired_ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return the median of a / b over rounds and its 95 % interval by ranks."""
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    reach = 0.98 * len(ratios) ** 0.5
    low, high = int(len(ratios) / 2 - reach), int(len(ratios) / 2 + reach)
    return statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]


def step(layer: nn.Module, x: Tensor, hidden: Tensor) -> None:
    x = x.detach().requires_grad_()
    out = layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0][~hidden]
    out.square().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", action="store_true", help="batches of 32 along the ratio of areas, always packed")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--attention", default="quest")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=10, help="of CPU time for each row")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, 1 thread, {platform.machine()}, {given.attention}, dropout {given.dropout:g}, "
        f"width {WIDTH}, {HEADS} heads\n"
    )
    cases = batches()
    if given.rule:
        attention.RAGGED = 0.0
        cases = {f"{n} and 31 of 30": [n] + [30] * 31 for n in (30, 40, 45, 50, 60, 80, 120, 200)}
    print("| batch of 32 graphs | areas | host | padded | ours | host / ours | padded / ours | rounds | packed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|:-:|")
    for title, sizes in ((title, sizes) for title, sizes in cases.items() if given.only in title):
        times, packs = milliseconds(sizes, given.attention, given.dropout, given.seconds)
        cells = [f"{statistics.median(found):.2f} ms" for found in times.values()]
        for other in ("host", "padded"):
            gain, low, high = paired_ratio(times[other], times["ours"])
            digits = 3 if gain < 1.5 else 1
            cells.append(f"{gain:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})")
        cells += [str(len(times["ours"])), "yes" if packs else "–"]
        print(f"| {title} | {ratio(sizes):.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
