"""The report of a run's folder: report.html (one file, no outside resources), report.md and results.parquet."""

from __future__ import annotations

import datetime
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from quest_core.errors import ConfigError, one_of
from quest_core.hosts.discovery import Record

from . import store
from .plan import Suite, catalogue, reproduce, write_value
from .stats import Estimate, estimate, paired, verdict
from .store import Stored
from .worker import encode, write_text

INK, GRID, PAPER = "#1f2328", "#d8dbe0", "#fffffe"
COLOURS = ("#5f6b7a", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3aa6d0", "#882255")
"""The baseline is grey; the rest follow Okabe and Ito's palette, told apart with colour-blind eyes."""
MARKERS = "osD^vPX*"

STYLE: Any = {
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Plot:
    """A figure for both reports; `file` is the PNG that the Markdown one names, `width` is in inches."""

    title: str
    caption: str
    width: float
    svg: str
    png: bytes
    file: str


@dataclass(frozen=True)
class Row:
    """One attention of one group: its cells by seed and what follows from them."""

    attention: str
    score: Estimate
    difference: Estimate | None  # None on the baseline's own row and where the baseline has no cell
    verdict: str
    seconds: float
    peak_rss_mib: float | None
    paper: float | None
    command: str
    values: Mapping[int, float]

    def words(self) -> tuple[str, ...]:
        """Attention, seeds, mean with interval, paired difference with interval, paper and verdict, for a terminal."""
        score = _number(self.score.mean) + (f" [{_interval(self.score)}]" if self.score.has_interval else "")
        gap = ""
        if self.difference:
            gap = _signed(self.difference.mean)
            gap += f" [{_interval(self.difference, signed=True)}]" if self.difference.has_interval else ""
        return self.attention, str(self.score.n), score, gap, _number(self.paper), self.verdict


@dataclass(frozen=True)
class Item:
    """A metric called ``<metric>/<item>``: one of those that the group's own is made of, such as a corruption.

    Attributes:
        name: what stands after the slash.
        estimates: by attention, over seeds.
        differences: from the baseline, paired by seed, for the other attentions.
    """

    name: str
    estimates: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]


@dataclass
class Group:
    """One task with one choice of option values: what a table shows."""

    suite: Suite
    task: str
    settings: str  # the options that are not at their default, in words
    smoke: bool
    rows: list[Row]
    cells: Sequence[Stored]
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)

    @property
    def title(self) -> str:
        metric = "" if self.suite.metric == self.suite.info["metric"] else self.suite.metric
        return " · ".join(filter(None, (f"{self.suite.name}/{self.task}", metric, self.settings)))

    @property
    def failed(self) -> list[Stored]:
        return [cell for cell in self.cells if cell.state == "failed"]

    @property
    def unfinished(self) -> int:
        return sum(cell.state == "unfinished" for cell in self.cells)

    def row(self, attention: str) -> Row | None:
        return next((row for row in self.rows if row.attention == attention), None)


def read_groups(out: Path, baseline: str) -> list[Group]:
    """The groups of a run's folder with their statistics, in the report's order, without plots.

    Raises:
        ConfigError: when the folder has no cell, or none of the asked baseline.
    """
    cells = _load(out)
    runs = store.read_run(out)
    attentions = {cell.cell["attention"] for cell in cells}
    if baseline not in attentions and baseline != "standard":
        raise ConfigError(f"--baseline is '{baseline}', which was not run here; {one_of(baseline, attentions)}")
    # a suite that only another environment has is known from the record of its run
    recorded = {run["suite"]: Suite.read(run["suite_info"], Record(run["suite"], "?", "?", "ok")) for run in runs}
    suites = {**recorded, **catalogue().suites}
    grouped = [(members, suites[members[0].cell["suite"]]) for members in _grouped(cells, runs)]
    return [_group(members, view, baseline, runs) for members, suite in grouped for view in suite.views()]


def _load(out: Path) -> list[Stored]:
    cells = store.load_all(out)
    if all(cell.state == "unfinished" for cell in cells):
        found = "holds no results" if out.is_dir() else "does not exist"
        raise ConfigError(f"{out} {found}; first run: quest bench run SUITE --out {out}")
    return cells


def write_report(out: Path, baseline: str) -> Path:
    """Write report.html, report.md with report/*.png, and results.parquet; the path of the HTML.

    Raises:
        ConfigError: when the folder has no cell, or none of the asked baseline.
    """
    groups = read_groups(out, baseline)
    cells = _load(out)
    table = frame(cells)
    with mpl.rc_context(STYLE):
        for number, group in enumerate(groups):
            group.plots = _plots(group, table, f"{number + 1:02d}")
    runs = store.read_run(out)
    facts = {
        "groups": groups,
        "attentions": _order({cell.cell["attention"] for cell in cells}, baseline, runs),
        "runs": runs,
        "states": {s: sum(c.state == s for c in cells) for s in ("done", "failed", "unfinished")},
        "versions": _versions(cells),
        "devices": sorted({cell.result["device"] for cell in cells if cell.result}),
        "baseline": baseline,
        "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    environment = Environment(
        loader=PackageLoader("quest_bench"),
        autoescape=lambda name: bool(name and ".html" in name),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=_number, signed=_signed, interval=_interval, seconds=_seconds, cell=_cell, glance=_glance, spread=_spread
    )
    environment.globals.update(last_line=store.last_line)
    pictures = out / "report"
    pictures.mkdir(exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    for plot in itertools.chain.from_iterable(group.plots for group in groups):
        (pictures / plot.file).write_bytes(plot.png)
    table.to_parquet(out / "results.parquet", index=False)
    write_text(out / "report.md", environment.get_template("report.md.j2").render(facts))
    page = out / "report.html"
    write_text(page, environment.get_template("report.html.j2").render(facts))
    return page


def frame(cells: Sequence[Stored]) -> pd.DataFrame:
    """One row a cell: suite, task, attention, seed, state, error, seconds, ..., `option/*`, `metric/*` and `series/*`.

    `options` holds all options as JSON text; the columns `option/*` hold each as text, because suites may use one
    name for different types.
    """
    rows = []
    for cell in cells:
        row: dict[str, Any] = {
            "suite": cell.cell["suite"],
            "task": cell.cell["task"],
            "attention": cell.cell["attention"],
            "seed": cell.cell["seed"],
            "smoke": cell.cell["smoke"],
            "state": cell.state,
            "error": cell.error,
            "folder": cell.folder.name,
            "options": json.dumps(cell.cell["options"]),
        }
        row.update({f"option/{key}": write_value(value) for key, value in cell.cell["options"].items()})
        if cell.result is not None:
            row.update({key: cell.result[key] for key in ("seconds", "peak_rss_mib", "device", "finished")})
            row["versions"] = json.dumps(cell.result["versions"])
            row.update({f"metric/{key}": float(value) for key, value in cell.result["metrics"].items()})
            row.update({f"series/{key}": [float(v) for v in values] for key, values in cell.result["series"].items()})
        rows.append(row)
    return pd.DataFrame(rows)


def _grouped(cells: Sequence[Stored], runs: Sequence[Mapping[str, Any]]) -> list[list[Stored]]:
    """Cells that differ only in attention and seed, together; ordered as they were run, then by task and options."""
    groups: dict[str, list[Stored]] = {}
    for cell in cells:
        same = {key: cell.cell[key] for key in ("suite", "task", "smoke", "data", "options")}
        groups.setdefault(json.dumps(encode(same), sort_keys=True), []).append(cell)
    suites = [run["suite"] for run in runs]

    def order(members: list[Stored]) -> tuple[Any, ...]:
        cell = members[0].cell
        place = suites.index(cell["suite"]) if cell["suite"] in suites else len(suites)
        values = sorted(cell["options"].items())
        by_size = [(0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for _, value in values]
        return place, cell["suite"], cell["task"], by_size

    return sorted(groups.values(), key=order)


def _group(members: Sequence[Stored], suite: Suite, baseline: str, runs: Sequence[Mapping[str, Any]]) -> Group:
    first = members[0].cell
    by_attention: dict[str, list[Stored]] = {}
    for cell in members:
        by_attention.setdefault(cell.cell["attention"], []).append(cell)
    order = _order(by_attention, baseline, runs)

    def values(attention: str) -> dict[int, float]:
        done = [c for c in by_attention.get(attention, ()) if c.result is not None]
        return {c.cell["seed"]: float(c.result["metrics"].get(suite.metric, math.nan)) for c in done if c.result}

    reference = values(baseline)
    rows = []
    for attention in order:
        ours = values(attention)
        difference = paired(ours, reference) if attention != baseline and reference else None
        if attention == baseline:
            words = "baseline"
        elif difference is None:
            words = f"no {baseline} to compare with"
        else:
            words = verdict(difference, suite.higher_is_better, baseline)
        done = [c.result for c in by_attention[attention] if c.result is not None]
        peaks = [r["peak_rss_mib"] for r in done if r["peak_rss_mib"] is not None]
        rows.append(
            Row(
                attention,
                estimate(list(ours.values())),
                difference,
                words,
                estimate([r["seconds"] for r in done]).mean,
                max(peaks, default=None),
                suite.paper.get(first["task"], {}).get(attention),
                reproduce({**first, "attention": attention}, [c.cell["seed"] for c in by_attention[attention]], suite),
                dict(sorted(ours.items())),
            )
        )
    settings = _describe_settings(
        {k: v for k, v in first["options"].items() if k not in suite.options or suite.options[k]["default"] != v}
    )
    items = _items(by_attention, order, suite.metric, baseline)
    return Group(suite, first["task"], settings, first["smoke"], rows, members, items)


def _items(
    by_attention: Mapping[str, Sequence[Stored]], order: Sequence[str], metric: str, baseline: str
) -> list[Item]:
    """The metrics called ``<metric>/<item>``, in the order in which the cells name them."""
    results = {attention: [c for c in by_attention[attention] if c.result is not None] for attention in order}
    names = dict.fromkeys(
        name
        for cells in results.values()
        for cell in cells
        for name in cell.result["metrics"]  # type: ignore[index]
        if name.startswith(f"{metric}/")
    )
    items = []
    for name in names:
        values = {
            attention: {c.cell["seed"]: float(c.result["metrics"].get(name, math.nan)) for c in cells if c.result}
            for attention, cells in results.items()
        }
        reference = values.get(baseline)
        differences = {a: paired(v, reference) for a, v in values.items() if a != baseline} if reference else {}
        items.append(
            Item(
                name.removeprefix(f"{metric}/").replace("_", " "),
                {attention: estimate(list(found.values())) for attention, found in values.items()},
                {attention: found for attention, found in differences.items() if found is not None},
            )
        )
    return items


def _order(found: Iterable[str], baseline: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The baseline first, then as the commands listed them."""
    listed = [attention for run in runs for attention in run["attentions"]]
    return sorted(found, key=lambda a: (a != baseline, listed.index(a) if a in listed else len(listed), a))


def _versions(cells: Sequence[Stored]) -> dict[str, list[str]]:
    """Package -> the versions that finished cells saw; more than one is worth a remark."""
    found: dict[str, set[str]] = {}
    for cell in cells:
        for package, version in (cell.result or {}).get("versions", {}).items():
            found.setdefault(package, set()).add(version)
    return {package: sorted(versions) for package, versions in found.items()}


# --- plots --------------------------------------------------------------------------------------------------------


def _plots(group: Group, table: pd.DataFrame, prefix: str) -> list[Plot]:
    order = [row.attention for row in group.rows]
    done = [cell for cell in group.cells if cell.result is not None]
    done.sort(key=lambda cell: (order.index(cell.cell["attention"]), cell.cell["seed"]))
    if not done:
        return []
    caption = "Dots are seeds; the bar is the 95% t-interval of their mean, the marker."
    if any(row.paper is not None for row in group.rows):
        caption += " The open diamond is the paper's figure."
    if group.suite.unit == "%":
        caption += " Bars are cut off at 0 and 100."
    drawn = [(f"{group.suite.metric} per attention", caption, _metric_figure(group))]
    first = group.suite.metric == group.suite.info["metric"]  # the other plots would be the same for every metric
    if len(group.items) > 1:
        caption = "The marker is the mean over seeds, the bar reaches from the lowest to the highest seed."
        drawn.append((f"{group.suite.metric} by item", caption, _items_figure(group)))
    names = list(dict.fromkeys(name for cell in done for name in cell.result["series"] if "/" not in name))  # type: ignore[index]
    if names and first:
        caption = "Mean over seeds; the band reaches from the lowest to the highest seed."
        drawn.append(("Over training", caption, _series_figure(group, done, names)))
    if group.suite.plots and first:
        module, _, function = group.suite.plots.partition(":")
        rows = table.set_index("folder").loc[[cell.folder.name for cell in done]].reset_index()
        results = [{**cell.cell, **cell.result} for cell in done]  # type: ignore[dict-item]
        try:
            drawn += getattr(import_module(module), function)(rows, results)
        except Exception as error:  # the numbers are worth a report without these plots
            group.notes.append(f"The suite's own plots ({group.suite.plots}) could not be drawn: {error!r}.")
    plots = []
    for title, caption, figure in drawn:
        stem = f"{prefix}-{_slug(f'{group.task}-{title}')}"
        width = figure.get_figwidth()
        plots.append(Plot(title, caption, width, _svg(figure, stem), _png(figure), f"{stem}.png"))
    return plots


def _metric_figure(group: Group) -> Figure:
    rows = [row for row in group.rows if row.values]
    figure = Figure(figsize=(7.2, 0.75 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(rows):
        colour, marker = COLOURS[height % len(COLOURS)], MARKERS[height % len(MARKERS)]
        finite = [v for v in row.values.values() if math.isfinite(v)]
        if row.score.has_interval:
            axes.plot([row.score.low, row.score.high], [height, height], color=colour, lw=2.2, solid_capstyle="butt")
        # seeds are spread a little, so that equal values stay visible
        spread = [height + 0.22 + 0.05 * (i % 3 - 1) for i in range(len(finite))]
        axes.plot(finite, spread, ".", color=colour, ms=5, alpha=0.75)
        axes.plot(row.score.mean, height, marker, color=colour, ms=7)
        if row.paper is not None:
            axes.plot(row.paper, height, "D", mfc="none", mec=INK, ms=7, mew=1.1)
    if group.suite.unit == "%":  # few seeds can have an interval of several hundred percent
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, -3), min(high, 103))
    axes.set_yticks(range(len(rows)), [row.attention for row in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{group.suite.metric} {f'({group.suite.unit})' if group.suite.unit else ''}".strip())
    return figure


def _items_figure(group: Group) -> Figure:
    """One line of the figure an item, the attentions below each other on it."""
    figure = Figure(figsize=(7.2, 1.0 + (0.14 + 0.12 * len(group.rows)) * len(group.items)), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(group.rows):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label: str | None = row.attention
        for height, item in enumerate(group.items):
            found = item.estimates[row.attention]
            if not found.n:
                continue
            place = height + 0.7 * ((number + 0.5) / len(group.rows) - 0.5)
            axes.plot([found.minimum, found.maximum], [place, place], color=colour, lw=1.6, solid_capstyle="butt")
            axes.plot(found.mean, place, marker, color=colour, ms=4.5, label=label)
            label = None  # one entry in the legend
    axes.set_yticks(range(len(group.items)), [item.name for item in group.items])
    axes.set_ylim(len(group.items) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{group.suite.metric} {f'({group.suite.unit})' if group.suite.unit else ''}".strip())
    figure.legend(loc="outside upper left", ncols=6, fontsize=9)
    return figure


def _series_figure(group: Group, done: Sequence[Stored], names: Sequence[str]) -> Figure:
    """Small multiples, one for each series, at most four beside each other."""
    columns = min(4 if len(names) % 4 in (0, 3) else 3, len(names))
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(9.6 / max(columns, 2) * columns, 2.1 * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, name in itertools.zip_longest(grid.flat, names):
        if name is None:
            axes.set_axis_off()
            continue
        for number, row in enumerate(group.rows):
            curves = [
                cell.result["series"][name]
                for cell in done
                if cell.result and cell.cell["attention"] == row.attention and name in cell.result["series"]
            ]
            if not curves:
                continue
            # seeds that stopped early leave the mean where they end
            wide = pd.DataFrame(itertools.zip_longest(*curves, fillvalue=math.nan), dtype=float)
            wide.index += 1
            colour = COLOURS[number % len(COLOURS)]
            handles[row.attention] = axes.plot(wide.index, wide.mean(axis=1), color=colour, lw=1.5)[0]
            if len(curves) > 1:
                axes.fill_between(wide.index, wide.min(axis=1), wide.max(axis=1), color=colour, alpha=0.16, lw=0)
        axes.set_title(name.replace("_", " "))
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel("recorded point of training", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=6, fontsize=9)
    return figure


def _svg(figure: Figure, salt: str) -> str:
    """The figure as inline SVG whose colours are the page's, so that it reads in light and dark."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    for name, colour in {"ink": INK, "grid": GRID, "paper": PAPER}.items():
        svg = re.sub(rf"((?:fill|stroke|stop-color): ){colour}", rf"\1var(--{name})", svg)
    for index, colour in enumerate(COLOURS):
        svg = re.sub(rf"((?:fill|stroke): ){colour}", rf"\1var(--c{index})", svg)
    return svg


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150, facecolor="white")
    return data.getvalue()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- words --------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
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


def _signed(value: float | None) -> str:
    text = _number(value)
    return f"+{text}" if value is not None and value > 0 else text


def _interval(of: Estimate, signed: bool = False) -> str:
    write = _signed if signed else _number
    return f"{write(of.low)} to {write(of.high)}" if of.has_interval else "–"


def _glance(row: Row) -> str:
    return _spread(row.score)


def _spread(found: Estimate) -> str:
    """The mean and half its interval."""
    mean = _number(found.mean)
    if not found.has_interval:
        return mean
    decimals = len(mean.partition(".")[2]) if "e" not in mean else 2
    return f"{mean} ± {(found.high - found.low) / 2:.{decimals}f}"


def _seconds(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


def _describe_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={write_value(value)}" for key, value in settings.items())


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
