"""What a plugin's tests need for its benchmark suites."""

import contextlib
import itertools
import json
import re
import resource
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quest_core import AttentionConfig, ConfigError
from quest_suites.contract import Cell, Result, Run

ROOT = Path(__file__).parents[1]

SMOKE_S = 60.0
"""The most seconds of the processor that a cell may take with --smoke."""


def smoke_cell(
    suites: Mapping[str, Mapping[str, Any]],
    folder: Path | None,
    suite: str,
    attention: str = "quest",
    *,
    task: str | None = None,
    seed: int = 0,
    smoke: bool = True,
    data: Path | None = None,
    **options: object,
) -> Cell:
    """Return a cell of the first task, or of `task`, with the options' defaults and a new workdir in `folder`."""
    defaults = {option["name"]: option["default"] for option in suites[suite]["options"]}
    task = task or suites[suite]["tasks"][0]
    return Cell(suite, task, attention, seed, smoke, data, defaults | options, Path(tempfile.mkdtemp(dir=folder)))


class HostSuites:
    """Tests of the suites of a host: inherit it as `TestSuites`."""

    committed: ClassVar[tuple[str, ...]]  # those whose committed commands run, shortened
    places: ClassVar[tuple[str, ...]] = ("research/results",)  # folders with these commands

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_every_committed_command_runs(self, tmp_path: Path) -> None:
        ran = []
        for place in self.places:
            folder = tmp_path / place.replace("/", "-")
            folder.mkdir()
            ran += run_committed(ROOT / place, self.committed, folder)
        assert {cell.split()[0] for cell in ran} == set(self.committed)


class _Kill(BaseException):
    """Stands for a signal; no suite catches it."""


def check_resume(run: Run, cell: Cell, folder: Path, share: float = 0.01) -> Result:
    """Assert that a cell that is stopped and run again has the result of one that runs through, but for times.

    It is stopped at the first report of progress that has reached `share`. Returned is the result of the resumed cell.
    """
    whole, parts = (replace(cell, workdir=folder / name) for name in ("whole", "parts"))
    for one in (whole, parts):
        one.workdir.mkdir(parents=True)
    wanted = run(whole, lambda fraction, text: None)

    def stop(fraction: float, text: str) -> None:
        if fraction >= share:
            raise _Kill

    with contextlib.suppress(_Kill):
        run(parts, stop)
        raise AssertionError(f"the cell never reported progress of {share}")
    reported: list[float] = []
    found = run(parts, lambda fraction, text: reported.append(fraction))
    first = min(fraction for fraction in reported if fraction > 0)
    assert first > share, f"the cell began again: its first report is {first}"
    for name in wanted.metrics.keys() | found.metrics.keys():
        if not any(words in name for words in ("second", "time of", "memory of")):
            same = wanted.metrics[name] == found.metrics[name] or wanted.metrics[name] != wanted.metrics[name]
            assert same, f"{name} is {found.metrics[name]}, and {wanted.metrics[name]} without a stop"
    assert wanted.details.keys() == found.details.keys(), "details are missing that a cell that runs through has"
    assert wanted.series == found.series, "the series differ from those of a cell that runs through"
    return found


def run_committed(results: Path, suites: Iterable[str], folder: Path) -> list[str]:
    """Run what `quest bench run` commands of committed results name, with --smoke.

    Every attention and task of a suite runs, and every choice of its options, but not every combination of them.

    Args:
        suites: the suites to run; commands of others, those that need data, and where quest-zoo is missing its
            attentions are left out.

    Returns:
        The cells that ran, in words. Each returns its metric, and takes at most `SMOKE_S` seconds of the processor,
        which a loaded machine changes less than elapsed ones.
    """
    installed = {name: info for point in entry_points(group="quest.suites") for name, info in point.load().items()}
    declared = {name: info for name, info in installed.items() if name in suites}
    seen: set[tuple[str, ...]] = set()
    ran: list[str] = []
    for command in sorted(set(committed_commands(results))):
        for name, task, attention, options in _named_cells(command, declared):
            as_text = json.dumps(options, sort_keys=True)
            new = {(name, task, attention), (name, as_text)} - seen
            if not new:
                continue
            seen |= new
            ran.append(f"{name} {task} {attention} {as_text}")
            workdir = folder / str(len(ran))
            workdir.mkdir()
            (entry,) = entry_points(group="quest.benchmarks", name=name)
            before = _processor_seconds()
            result = entry.load()(Cell(name, task, attention, 0, True, None, options, workdir), lambda *_: None)
            assert declared[name]["metric"] in result.metrics, f"{command}: {result.metrics}"
            seconds = _processor_seconds() - before
            assert seconds <= SMOKE_S, f"{ran[-1]}: --smoke takes {seconds:.0f} s, at most {SMOKE_S:g}"
    return ran


def _named_cells(command: str, declared: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield suite, task, attention and options: the first task with each attention, then the others with the first."""
    verb, *words = shlex.split(command)[2:]  # after "quest bench"
    if verb != "run":
        return
    selector, *flags = words
    name = next((one for one in declared if selector == one or selector.startswith(f"{one}/")), None)
    if name is None or "--data" in flags:
        return
    options = {option["name"]: option["default"] for option in declared[name]["options"]}
    for flag, word in itertools.pairwise(flags):
        if flag == "--set":
            key, values = word.split("=", 1)
            first = values.split(",")[0]
            options[key] = first if isinstance(options[key], str) else json.loads(first)
    asked = dict(itertools.pairwise(flags)).get("--attention", "standard,quest")
    attentions = re.split(r",\s*(?![^(]*\))", asked)
    attentions = [one for one in attentions if entry_points(group="quest.attention", name="zoo") or _is_known(one)]
    tasks = list(filter(None, selector[len(name) + 1 :].split(","))) or declared[name]["tasks"]
    yield from ((name, tasks[0], attention, options) for attention in attentions)
    yield from ((name, task, attentions[0], options) for task in tasks[1:])


def _is_known(attention: str) -> bool:
    try:
        AttentionConfig.parse(attention)
    except ConfigError:
        return False
    return True


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def committed_commands(results: Path) -> Iterator[str]:
    """Yield the `quest bench` commands in reports and records below a folder, with shell variables filled in."""
    files = sorted(results.rglob("*"))
    for path in (path for path in files if path.name == "run.json"):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            yield run["command"]
    for path in (path for path in files if path.suffix == ".md"):
        variables: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"(\w+)='(.*)'$", line):
                variables[match[1]] = match[2]
            for command in re.findall(r"(?:^|`)(quest bench [^`]+)", line):
                for name, value in variables.items():
                    command = command.replace(f"${name}", value)
                yield command.strip()
