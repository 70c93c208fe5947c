"""Cells of the suites, with their default options."""

from importlib.metadata import entry_points
from pathlib import Path

from devtools.cells import smoke_cell
from quest_research.suites.suites import SUITES
from quest_suites.contract import Cell, Result, Run


def cell(
    suite: str, task: str, attention: str = "quest", data: Path | None = None, *, smoke: bool = True, **options: object
) -> Cell:
    """Return a cell of seed 0 in a new folder."""
    return smoke_cell(SUITES, None, suite, attention, task=task, data=data, smoke=smoke, **options)


def runner(suite: str) -> Run:
    """Return the function of a suite, without the times and the memory of its results, which differ from run to run."""
    (entry,) = entry_points(group="quest.benchmarks", name=suite)
    function = entry.load()

    def run(given: Cell, progress: object) -> Result:
        found = function(given, progress)
        metrics = {name: x for name, x in found.metrics.items() if not name.startswith(("time of", "memory of"))}
        return Result(metrics, found.series, found.details)

    return run


def run(given: Cell) -> Result:
    """Run a cell."""
    (entry,) = entry_points(group="quest.benchmarks", name=given.suite)
    result: Result = entry.load()(given, lambda fraction, text: None)
    return result
