"""Cells of the suites, with their default options."""

from importlib.metadata import entry_points
from pathlib import Path

from devtools.cells import smoke_cell
from quest_research.suites.suites import SUITES
from quest_suites.contract import Cell, Progress, Result


def cell(
    suite: str, task: str, attention: str = "quest", data: Path | None = None, *, smoke: bool = True, **options: object
) -> Cell:
    """Return a cell of seed 0 in a new folder."""
    return smoke_cell(SUITES, None, suite, attention, task=task, data=data, smoke=smoke, **options)


def run(given: Cell, progress: Progress = lambda share, text: None) -> Result:
    (entry,) = entry_points(group="quest.benchmarks", name=given.suite)
    result: Result = entry.load()(given, progress)
    return result
