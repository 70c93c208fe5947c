"""Seconds per epoch of TSTPlus: tsai's own attention, `standard` and another mechanism through the plugin.

    OMP_NUM_THREADS=1 python benchmarks/epoch_time.py [--attention quest] [--length 29] [--rounds 9]

Each round trains one epoch of every variant in turn, in an order that rotates, so that a change of the machine's load
meets all alike. Printed are the median ratio to the stock model of the same round, and its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from tsai.basics import TSClassification, TSClassifier

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on


def learner(attention: str | None, options: argparse.Namespace, model: dict[str, Any]) -> TSClassifier:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((options.series, 12, options.length)).astype(np.float32)
    if options.padded:
        x[::2, :, options.length * 2 // 3 :] = np.nan
    labels = np.arange(len(x)) % 9
    held_out = 32
    splits = (list(range(len(x) - held_out)), list(range(len(x) - held_out, len(x))))
    config = {**model, **({} if attention is None else {"attention": attention})}
    return TSClassifier(
        x, labels, splits=splits, tfms=[None, TSClassification()], bs=[16, 32], arch="TSTPlus", arch_config=config,
        path=tempfile.gettempdir(), seed=0,
    )  # fmt: skip


def epoch(learn: TSClassifier) -> float:
    started = time.process_time() if not torch.cuda.is_available() else time.perf_counter()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-4)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter() - started
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="quest", help="the mechanism beside standard")
    parser.add_argument("--length", type=int, default=29, help="time steps")
    parser.add_argument("--series", type=int, default=302, help="series, 32 of them held out")
    parser.add_argument("--rounds", type=int, default=9, help="epochs of each variant")
    parser.add_argument("--padded", action="store_true", help="every other series ends in NaN")
    options = parser.parse_args()
    for res_attention in (True, False):
        model = {"d_model": 128, "n_heads": 8, "d_ff": 256, "dropout": 0.1, "res_attention": res_attention}
        learners = {name: learner(name, options, model) for name in ("standard", options.attention)}
        learners = {"stock": learner(None, options, model), **learners}
        for learn in learners.values():
            epoch(learn)
        seconds: dict[str, list[float]] = {name: [] for name in learners}
        names = list(learners)
        for round_ in range(options.rounds):
            start = round_ % len(names)
            for name in names[start:] + names[:start]:
                seconds[name].append(epoch(learners[name]))
        print(f"res_attention={res_attention} length={options.length} padded={options.padded}")
        for name, times in seconds.items():
            ratios = [ours / stock for ours, stock in zip(times, seconds["stock"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(
                f"  {name:10s} {statistics.median(times):.3f} s/epoch   {middle:.3f} of stock ({low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    main()
