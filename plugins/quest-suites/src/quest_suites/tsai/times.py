"""time/tsai: an epoch of TSTPlus in tsai's own learner, against an epoch with tsai's own attention."""

import numpy as np
from tsai.basics import TSClassification, TSClassifier

import quest_tsai  # noqa: F401  # tsai accepts attention= from here on
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import Step, against_stock

LENGTH, TRAINED, HELD_OUT = 29, 270, 32


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time an epoch of each of two models in turns; see `quest_suites.timing.against_stock`."""
    series = (48 if cell.smoke else TRAINED) + HELD_OUT
    x = np.random.default_rng(0).standard_normal((series, 12, LENGTH)).astype(np.float32)
    splits = (list(range(series - HELD_OUT)), list(range(series - HELD_OUT, series)))
    residual = cell.task == "residual-scores"
    sizes = {"d_model": 128, "n_heads": 8, "d_ff": 256, "dropout": 0.1, "res_attention": residual}

    def make(attention: str | None) -> Step:
        learn = TSClassifier(
            x, np.arange(series) % 9, splits=splits, tfms=[None, TSClassification()], bs=[16, 32], arch="TSTPlus",
            arch_config={**sizes, **({"attention": attention} if attention else {})}, path=cell.workdir, seed=cell.seed,
        )  # fmt: skip

        def epoch() -> None:
            with learn.no_bar(), learn.no_logging():
                learn.fit(1, 1e-4)

        return epoch

    return against_stock(cell, progress, make)
