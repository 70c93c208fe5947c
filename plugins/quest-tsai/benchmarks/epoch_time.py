"""Seconds per epoch of TSTPlus: tsai's own attention, `standard` and another mechanism through the plugin.

    OMP_NUM_THREADS=1 python benchmarks/epoch_time.py [--attention quest] [--length 29] [--models 3] [--rounds 21]

Equal models differ by up to one percent for as long as a process runs, by where their tensors lie. So there are several
of each variant, made in turn. Each round trains one epoch of every model, in a random order, so that a change of the
machine's load meets all alike. A model's figure is the median over the rounds of its ratio to the stock models' mean in
the same round; printed are the mean of a variant's models, and the lowest and highest.
"""

from __future__ import annotations

import argparse
import random
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
    parser.add_argument("--attention", default="quest", help="the mechanism to compare with standard")
    parser.add_argument("--length", type=int, default=29, help="time steps")
    parser.add_argument("--series", type=int, default=302, help="series, 32 of them held out")
    parser.add_argument("--models", type=int, default=3, help="models of each variant")
    parser.add_argument("--rounds", type=int, default=21, help="epochs of each model")
    parser.add_argument("--padded", action="store_true", help="every other series ends in NaN")
    options = parser.parse_args()
    for res_attention in (True, False):
        model = {"d_model": 128, "n_heads": 8, "d_ff": 256, "dropout": 0.1, "res_attention": res_attention}
        names = [("stock", "standard", options.attention)[i % 3] for i in range(3 * options.models)]
        learners = [learner(None if name == "stock" else name, options, model) for name in names]
        for learn in learners:
            epoch(learn)
        seconds: list[list[float]] = [[] for _ in learners]
        for _ in range(options.rounds):
            for i in random.sample(range(len(learners)), len(learners)):
                seconds[i].append(epoch(learners[i]))
        stock = [statistics.mean(row) for row in zip(*seconds[::3], strict=True)]
        print(f"res_attention={res_attention} length={options.length} padded={options.padded}")
        for first, name in enumerate(names[:3]):
            times = seconds[first::3]
            ratios = [statistics.median(a / b for a, b in zip(own, stock, strict=True)) for own in times]
            middle = statistics.median(time for own in times for time in own)
            print(
                f"  {name:10s} {middle:.3f} s/epoch   {statistics.mean(ratios):.3f} of stock "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )


if __name__ == "__main__":
    main()
