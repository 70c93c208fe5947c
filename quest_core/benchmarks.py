"""The contract between a plugin's benchmark tasks and `quest bench`.

A plugin declares its suites as data in a module of its sub-package ``bench`` (README of quest-bench: the keys), which
``info.py`` names, for example ``"suites": "quest_tsai.bench.suites:SUITES"``. It implements each suite as one function
``run(cell, progress) -> Result`` under the entry-point group ``quest.benchmarks``. One call trains and evaluates one
cell: one task, one attention, one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Cell:
    """One unit of work.

    Attributes:
        suite: the suite's name, e.g. "ts/uea".
        task: the task inside the suite, e.g. "JapaneseVowels".
        attention: the attention as text (see AttentionConfig).
        seed: seeds everything that is random in the cell.
        smoke: shorten the run to seconds; the numbers then mean nothing.
        data: a folder with the user's own data in its official layout, or None for what the suite brings.
        options: the suite's options, as declared, converted and with defaults filled in.
        workdir: a folder of the cell's own for checkpoints and logs. It is kept when the cell is stopped, so a suite
            can continue from its own checkpoint there.
        data_fingerprint: a hash of the content of the task's files in `data`; None without `data`.
    """

    suite: str
    task: str
    attention: str
    seed: int
    smoke: bool
    data: Path | None
    options: Mapping[str, Any]
    workdir: Path
    data_fingerprint: str | None = None


@dataclass
class Result:
    """What a cell found. All values are plain numbers, texts, lists and mappings, so that it writes as JSON.

    Attributes:
        metrics: name -> value; the suite's own metric is among them.
        series: name -> values over training, for plots.
        details: whatever else a reader of one cell may want.
    """

    metrics: dict[str, float]
    series: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


Progress: TypeAlias = Callable[[float, str], None]
"""progress(fraction done in 0..1, a short text such as "epoch 12 accuracy 0.97")."""

Run: TypeAlias = Callable[[Cell, Progress], Result]
