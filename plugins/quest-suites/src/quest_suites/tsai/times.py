"""time/tsai: an epoch of TSTPlus in tsai's own learner, against an epoch with tsai's own attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tsai.basics import TSClassification, TSClassifier

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import beside_stock

HELD_OUT = 32


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time an epoch of each of two models in turns; see `quest_suites.timing.beside_stock`.

    Args:
        cell: `task` says whether TSTPlus passes its attention scores on to the next layer, as it does by default.
        progress: called after each round.
    """
    options = {**cell.options, **({"series": 48 + HELD_OUT, "rounds": 2} if cell.smoke else {})}
    generator = np.random.default_rng(0)
    x = generator.standard_normal((options["series"], 12, options["length"])).astype(np.float32)
    if options["padded"]:
        x[::2, :, options["length"] * 2 // 3 :] = np.nan
    model = {
        "d_model": 128,
        "n_heads": 8,
        "d_ff": 256,
        "dropout": 0.1,
        "res_attention": cell.task == "residual-scores",
    }
    own = {**model, "attention": cell.attention}
    steps = [partial(epoch, learner(x, config, cell)) for config in (model, own)]
    return beside_stock(*steps, rounds=options["rounds"], progress=progress)


def learner(x: np.ndarray, config: dict[str, Any], cell: Cell) -> TSClassifier:
    """Return tsai's learner for series [n, features, time steps] of 9 classes."""
    splits = (list(range(len(x) - HELD_OUT)), list(range(len(x) - HELD_OUT, len(x))))
    return TSClassifier(
        x, np.arange(len(x)) % 9, splits=splits, tfms=[None, TSClassification()], bs=[16, 32], arch="TSTPlus",
        arch_config=config, path=cell.workdir, seed=cell.seed,
    )  # fmt: skip


def epoch(learn: TSClassifier) -> None:
    """Train one epoch."""
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-4)
