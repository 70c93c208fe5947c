"""From the cells of a run's folder to the tables of its report: rows, comparisons and conclusions."""

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quest_core.errors import ConfigError, one_of

from . import store
from .plan import Record, Suite, catalogue, reproduce, write_value
from .stats import Comparison, Estimate, compare, correct, estimate, verdict
from .store import Stored
from .worker import encode

SELECTIONS = {
    "validation": "The reported epoch is the best one on a validation split.",
    "last": "The reported epoch is the last one; nothing is selected.",
    "none": "Each cell is one measurement; nothing is selected.",
    "paper": "The reported epoch is the best one on the test split, as in the paper's protocol. That is optimistic, "
    "and more so the noisier a curve is, so it can favor one attention.",
}
UNKNOWN_SELECTION = "The suite does not declare how the reported epoch is selected."


@dataclass(frozen=True)
class Row:
    """One attention of one group."""

    attention: str
    planned: int  # cells that were asked for
    finished: int  # those with a finite value
    failed: int  # cells that failed or diverged
    score: Estimate  # over the seeds that are finite for this attention and for the baseline
    baseline_score: Estimate | None  # the baseline's over the same seeds, if the baseline finished more
    comparison: Comparison | None  # with the baseline, corrected over the report; None on the baseline's own row
    verdict: str
    seconds: float
    paper: float | None
    paper_spread: float | None
    command: str
    values: Mapping[int, float]  # seed -> value; NaN for a failed cell; a cell without this metric is absent

    @property
    def mark(self) -> str:
        return self.comparison.mark if self.comparison else ""

    @property
    def difference(self) -> Estimate | None:
        return self.comparison.difference if self.comparison else None

    @property
    def equal(self) -> bool:
        """Whether every seed has the baseline's value, which p = 1 does not say."""
        return bool(self.comparison and not (self.comparison.wins or self.comparison.losses or self.failed))


@dataclass(frozen=True)
class Item:
    """A metric called ``<metric>/<item>``: a part of the group's own metric, such as one corruption."""

    name: str
    estimates: Mapping[str, Estimate]  # by attention, over seeds
    differences: Mapping[str, Estimate]  # from the baseline, paired by seed; they are not tested


@dataclass
class Group:
    """One task with one choice of option values: one table."""

    suite: Suite
    task: str
    settings: str  # the options that are not at their default, in words
    smoke: bool
    baseline: str
    selection: str
    rows: list[Row]
    cells: Sequence[Stored]
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Any] = field(default_factory=list)

    @property
    def title(self) -> str:
        metric = "" if self.first_metric else self.suite.metric
        return " · ".join(filter(None, (f"{self.suite.name}/{self.task}", metric, self.settings)))

    @property
    def first_metric(self) -> bool:
        return bool(self.suite.metric == self.suite.info["metric"])

    @property
    def failed(self) -> list[Stored]:
        return [cell for cell in self.cells if cell.state == "failed"]

    @property
    def unfinished(self) -> int:
        return sum(cell.state == "unfinished" for cell in self.cells)

    def row(self, attention: str) -> Row | None:
        return next((row for row in self.rows if row.attention == attention), None)

    @property
    def points(self) -> str:
        """The unit of a difference: that of the metric, and "points" for a percentage."""
        return "points" if self.suite.unit == "%" else str(self.suite.unit or "")

    @property
    def common(self) -> tuple[int, ...]:
        """The seeds that every attention finished, apart from attentions that finished none."""
        done = [{seed for seed, value in row.values.items() if math.isfinite(value)} for row in self.rows]
        return tuple(sorted(set.intersection(*filter(None, done)))) if any(done) else ()

    @property
    def cut(self) -> bool:
        """Whether some attention finished more seeds than all have in common."""
        return any(row.finished > len(self.common) for row in self.rows)

    def glance(self, attention: str) -> str:
        """The mean over `common` and half its interval, and how many seeds failed."""
        row = self.row(attention)
        if row is None or not row.values:
            return ""
        text = spread(estimate([row.values.get(seed, math.nan) for seed in self.common]))
        return f"{text}, {row.failed} of {row.planned} failed" if row.failed else text

    @property
    def conclusion(self) -> str:
        """The finding in one sentence."""
        compared = [row for row in self.rows if row.comparison and row.comparison.test]
        if not compared:
            why = "a test needs two seeds in common (quest bench run --seeds 0-4)"
            if self.row(self.baseline) is None:
                why = f"{self.baseline} was not run (quest bench report --baseline NAME compares with another)"
            elif len(self.rows) == 1:
                why = "no other attention was run"
            return f"Nothing is compared with {self.baseline}: {why}."
        parts = []
        for word, mark in (("better", "▲"), ("worse", "▼")):
            names = [f"{row.attention} ({self._gain(row)})" for row in compared if row.mark == mark]
            if names:
                parts.append(f"{join(names)} {'is' if len(names) == 1 else 'are'} {word} than {self.baseline}")
        equal = [row.attention for row in compared if row.equal]
        if equal:
            values = {value for row in self.rows for value in row.values.values()}
            alike = f", and every cell has {number(values.pop())}" if len(values) == 1 else ""
            have = "has" if len(equal) == 1 else "have"
            parts.append(f"{join(equal)} {have} the result of {self.baseline} on every seed{alike}")
        for test in ("paired t", "sign"):
            of_test = [row for row in compared if row.comparison and row.comparison.test == test]
            undecided = [row for row in of_test if not row.mark and not row.equal]
            if undecided:
                parts.append(self._no_difference(undecided))
        parts += [f"{row.attention} failed on {row.failed} of {row.planned} seeds" for row in self.rows if row.failed]
        return "; ".join(parts) + "."

    def _gain(self, row: Row) -> str:
        assert row.comparison is not None
        if row.comparison.test == "sign":
            return f"{row.comparison.wins} of {row.comparison.seeds} seeds won"
        unit = f" {self.points}" if self.points else ""
        found = row.comparison.difference
        return f"{with_sign(found.mean)}{unit}, {interval(found, signs=True)}"

    def _no_difference(self, rows: Sequence[Row]) -> str:
        """What rows without a significant difference share, and what they can miss, which a sign test does not say."""
        found = [row.comparison for row in rows if row.comparison]
        seeds = join([f"{n}" for n in sorted({one.seeds for one in found})], "or")
        text = f"{join([row.attention for row in rows])}: no significant difference from {self.baseline} over {seeds} "
        text += "seed" if seeds == "1" else "seeds"
        detectable = sorted({number(one.detectable) for one in found if math.isfinite(one.detectable)}, key=float)
        if detectable:
            unit = f" {self.points}" if self.points else ""
            ends = " to ".join(dict.fromkeys((detectable[0], detectable[-1])))
            text += f", which can miss differences below {ends}{unit}"
        return text


def join(names: Sequence[str], word: str = "and") -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def read_groups(out: Path, baseline: str) -> list[Group]:
    """Return the groups of a run's folder with their statistics, in the report's order, without plots."""
    cells = load_cells(out)
    runs = store.read_run(out)
    attentions = {cell.spec["attention"] for cell in cells}
    if baseline not in attentions and baseline != "standard":
        raise ConfigError(f"--baseline is '{baseline}', which was not run here; {one_of(baseline, attentions)}")
    ended = [members for members in _comparable(cells, runs) if any(cell.state != "unfinished" for cell in members)]
    grouped = [(members, _suite_of(members[0].spec, runs, out)) for members in ended]
    groups = [_group(members, view, baseline, runs) for members, suite in grouped for view in suite.views()]
    family = correct([row.comparison for group in groups for row in group.rows if row.comparison])
    corrected = iter(family)
    for group in groups:
        for place, row in enumerate(group.rows):
            if row.comparison:
                found = next(corrected)
                group.rows[place] = replace(row, comparison=found, verdict=verdict(found, baseline))
    return groups


def _suite_of(cell: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], out: Path) -> Suite:
    """Return the suite of a cell: the installed one, or else the one that run.json recorded.

    The recorded one also counts for a suite that finds its tasks in a data folder, because a task may have a metric of
    its own there. A suite that is installed only in another environment is not known here.
    """
    name, task = cell["suite"], cell["task"]
    declared = catalogue().suites.get(name)
    if declared is not None and declared.tasks:
        return declared
    for run in reversed(runs):
        if run["suite"] == name and task in run["tasks"]:
            return Suite.read(run["suite_info"], Record(name, "?", "?"))
    if declared is None:
        raise ConfigError(f"{out} holds cells of suite '{name}', which no run.json and no plugin describes")
    return declared


def load_cells(out: Path) -> list[Stored]:
    """Return the cells of a run's folder; raises ConfigError if none has ended."""
    cells = store.load_all(out)
    if all(cell.state == "unfinished" for cell in cells):
        found = "holds no results" if out.is_dir() else "does not exist"
        raise ConfigError(f"{out} {found}; first run: quest bench run SUITE --out {shlex.quote(str(out))}")
    return cells


def _comparable(cells: Sequence[Stored], runs: Sequence[Mapping[str, Any]]) -> list[list[Stored]]:
    """Cells that differ only in attention and seed, together; ordered as they were run."""
    groups: dict[str, list[Stored]] = {}
    for cell in cells:
        same = {key: cell.spec[key] for key in ("suite", "task", "smoke", "data", "options")}
        groups.setdefault(json.dumps(encode(same), sort_keys=True), []).append(cell)
    suites = [run["suite"] for run in runs]
    tasks = list(dict.fromkeys(task for run in runs for task in run["tasks"]))

    def place(members: list[Stored]) -> tuple[Any, ...]:
        spec = members[0].spec
        suite = suites.index(spec["suite"]) if spec["suite"] in suites else len(suites)
        task = tasks.index(spec["task"]) if spec["task"] in tasks else len(tasks)
        values = sorted(spec["options"].items())
        by_size = [(0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for _, value in values]
        return suite, spec["suite"], task, spec["task"], by_size

    return sorted(groups.values(), key=place)


def _group(members: Sequence[Stored], suite: Suite, baseline: str, runs: Sequence[Mapping[str, Any]]) -> Group:
    first = members[0].spec
    by_attention: dict[str, list[Stored]] = {}
    for cell in members:
        by_attention.setdefault(cell.spec["attention"], []).append(cell)
    names = order(by_attention, baseline, runs)
    values = {name: _values(by_attention[name], suite, suite.metric) for name in names}
    reference = values.get(baseline, {})
    rows = []
    for attention in names:
        own = values[attention]
        done = [c.result for c in by_attention[attention] if c.result is not None]
        words, comparison = f"no {baseline} to compare with", None
        if attention == baseline:
            words = "baseline"
        elif done and not own:
            words = "not measured"
        elif reference:
            comparison = compare(own, reference, suite.higher_is_better)
        shared, baseline_score = own, None
        if comparison:
            shared = {seed: own[seed] for seed in own if math.isfinite(own[seed] - reference.get(seed, math.nan))}
            if shared and shared.keys() != {seed for seed, value in reference.items() if math.isfinite(value)}:
                baseline_score = estimate([reference[seed] for seed in shared])
        finite = sum(map(math.isfinite, own.values()))
        seeds = {c.spec["seed"] for c in by_attention[attention]}
        paper = suite.paper_value(first["task"], attention)
        rows.append(
            Row(
                attention,
                planned=len(seeds),
                finished=finite,
                failed=len(own) - finite,
                score=estimate(list(shared.values())),
                baseline_score=baseline_score,
                comparison=comparison,
                verdict=words,
                seconds=estimate([result["seconds"] for result in done]).mean,
                paper=paper.get("value"),
                paper_spread=paper.get("spread"),
                command=reproduce({**first, "attention": attention}, seeds, suite),
                values=dict(sorted(own.items())),
            )
        )
    settings = ", ".join(f"{key}={write_value(value)}" for key, value in suite.changes(first["options"]).items())
    chosen = first["options"].get("select", suite.info.get("selection"))
    selection = SELECTIONS.get(chosen, UNKNOWN_SELECTION)
    items = _items(by_attention, names, suite, baseline)
    return Group(suite, first["task"], settings, first["smoke"], baseline, selection, rows, members, items)


def _values(cells: Sequence[Stored], suite: Suite, metric: str) -> dict[int, float]:
    """Seed -> value; NaN where the cell failed or diverged.

    Left out are cells that have not ended, and those that did not diverge but lack the metric.
    """
    found, own = {}, suite.info["metric"]
    for cell in cells:
        metrics = cell.result["metrics"] if cell.result else {own: math.nan}
        diverged = not math.isfinite(metrics.get(own, 0.0))
        if cell.state != "unfinished" and (metric in metrics or diverged):
            value = metrics.get(metric, math.nan)
            found[cell.spec["seed"]] = value if math.isfinite(value) else math.nan
    return found


def _items(
    by_attention: Mapping[str, Sequence[Stored]], names: Sequence[str], suite: Suite, baseline: str
) -> list[Item]:
    """The metrics called ``<metric>/<item>``, in the order in which the cells name them."""
    results = {attention: [c for c in by_attention[attention] if c.result is not None] for attention in names}
    keys = dict.fromkeys(
        key
        for cell in itertools.chain.from_iterable(results.values())
        for key in (cell.result or {})["metrics"]
        if key.startswith(f"{suite.metric}/")
    )
    items = []
    for key in keys:
        values = {attention: _values(cells, suite, key) for attention, cells in results.items()}
        if not any(math.isfinite(value) for found in values.values() for value in found.values()):
            continue  # every cell diverged
        reference = values.get(baseline, {})
        differences = {a: compare(v, reference, True).difference for a, v in values.items() if a != baseline}
        items.append(
            Item(
                key.removeprefix(f"{suite.metric}/").replace("_", " "),
                {attention: estimate(list(found.values())) for attention, found in values.items()},
                differences if reference else {},
            )
        )
    return items


def order(found: Iterable[str], baseline: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The baseline first, then as the commands listed them."""
    listed = [attention for run in runs for attention in run["attentions"]]
    return sorted(found, key=lambda a: (a != baseline, listed.index(a) if a in listed else len(listed), a))


# --- words --------------------------------------------------------------------------------------------------------


def paper_text(row: Row) -> str:
    """The paper's figure with its spread: "0.069 ± 0.002"."""
    return number(row.paper) + ("" if row.paper_spread is None else f" ± {number(row.paper_spread)}")


def paper_words(group: Group) -> str:
    """Where the paper's figures stand, by which protocol, and how this group's differs; a sentence each."""
    paper = group.suite.paper
    spread = f"; ± is the {paper['spread']}" if paper["spread"] else "; it gives no spread"
    ran = f" This group ran with {group.settings}." if group.settings else ""
    return (
        f"{paper['source']}, {paper['table']}{spread}. Its protocol: {paper['protocol']}. This suite's difference: "
        f"{paper['difference']}.{ran}"
    )


def number(value: float | None) -> str:
    """Four digits or so, plainly: 57.83, 0.942, 1240; as many decimals for all numbers of a size."""
    if value is None or math.isnan(value):
        return "–"
    size = abs(value)
    if math.isinf(value):
        text = "∞"
    elif size == 0:
        text = "0"
    elif size < 0.001 or size >= 1e6:
        text = f"{size:.2e}"
    else:
        text = f"{size:.{3 if size < 1 else 2 if size < 100 else 1 if size < 1000 else 0}f}"
    return f"−{text}" if value < 0 else text


def with_sign(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value is not None and value > 0 else text


def interval(of: Estimate, signs: bool = False) -> str:
    write = with_sign if signs else number
    return f"{write(of.low)} to {write(of.high)}" if of.has_interval else "–"


def mean(row: Row) -> str:
    """The mean and its interval, or the count of failed seeds in place of the interval."""
    shown = f"{row.failed} of {row.planned} failed" if row.failed else interval(row.score)
    return number(row.score.mean) + (f" ({shown})" if shown != "–" else "")


def gain(row: Row) -> str:
    """The paired difference and its interval, or the counts of a sign test in place of the interval."""
    if not row.comparison or not row.difference:
        return "–"
    shown = interval(row.difference, signs=True)
    if row.comparison.test == "sign":
        shown = f"{row.comparison.wins} won, {row.comparison.losses} lost"
    return with_sign(row.difference.mean) + (f" ({shown})" if shown != "–" else "")


def spread(found: Estimate) -> str:
    """The mean and half its interval."""
    mean = number(found.mean)
    if not found.has_interval:
        return mean
    half = (found.high - found.low) / 2
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {number(half)}" if "e" in mean else f"{mean} ± {half:.{decimals}f}"


def seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def quote(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
