"""The report of a run's folder: report.html (one file, no outside resources) and report.md."""

import base64
import functools
import gzip
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import vl_convert
from cycler import cycler
from jinja2 import Environment, PackageLoader, StrictUndefined

from . import charts, groups, store
from .charts import Chart, Picture
from .groups import Group, load_cells, read_groups
from .stats import write_p
from .store import Stored
from .worker import utc, whole, write_text

STYLE: Any = {  # for the figures that a suite draws itself
    "figure.facecolor": "white",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=charts.COLOURS),
    "grid.color": "#d8dbe0",
    "font.size": 9,
    "legend.frameon": False,
}


def write_report(out: Path, baseline: str) -> Path:
    """Write report.html and report.md with report/*.png, and results.parquet if the folder holds cells.

    Returns:
        The path of the HTML.
    """
    facts = _facts(out, baseline)
    plots = facts["plots"]
    pictures = out / "report"
    pictures.mkdir(exist_ok=True)
    for plot in plots:
        with whole(pictures / plot.file) as neighbor:
            neighbor.write_bytes(plot.png())
    for old in {*pictures.glob("*.png")} - {pictures / plot.file for plot in plots}:
        old.unlink()
    if any(out.glob("cells/*")):  # else results.parquet is what the report is made from
        store.write_table(load_cells(out), out / "results.parquet")
    write_text(out / "report.md", _render("report.md.j2", facts))
    packed = {"script": _script() if facts["specs"] else "", "specs": _pack(_charts_json(facts))}
    page = out / "report.html"
    write_text(page, _render("report.html.j2", facts | packed))
    return page


def write_page(results: Path, out: Path, baseline: str) -> None:
    """Write the page of a site, whose charts the browser draws: report.md, charts.js, and pictures that suites draw.

    charts.js sets `reportCharts`, the specifications in the order of the page's `data-spec`, and both themes.
    """
    facts = _facts(results, baseline)
    (out / "report").mkdir(parents=True, exist_ok=True)
    for plot in facts["plots"]:
        if isinstance(plot, Picture):
            (out / "report" / plot.file).write_bytes(plot.data)
    write_text(out / "charts.js", f"reportCharts = {_charts_json(facts)};\n")
    write_text(out / "report.md", _render("report.md.j2", facts | {"site": True, "created": ""}))


def _charts_json(facts: Mapping[str, Any]) -> str:
    """The specifications of all charts and both themes as JSON."""
    content = {"specs": facts["specs"], "light": charts.theme(False), "dark": charts.theme(True)}
    return json.dumps(content, separators=(",", ":"))


def javascript() -> str:
    """Return the library that draws charts, as a script that sets `vegaEmbed`."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{{bundle}}})();"  # a module's own names stay its own


def _facts(out: Path, baseline: str) -> dict[str, Any]:
    """Return what both templates show."""
    found = read_groups(out, baseline)
    cells = load_cells(out)
    table = pd.DataFrame(store.rows(cells))
    points = charts.share(found)
    with mpl.rc_context(STYLE):
        for place, group in enumerate(found):
            group.plots = _plots(group, table, f"{place + 1:02d}", points)
    runs = store.read_run(out)
    caption = (
        f"Paired differences from {baseline}, in the unit of each table, with uncorrected 95% intervals; right is "
        "better. A row with a failed seed has no interval."
    )
    forest = charts.forest(found, baseline)
    overview = [Chart("All tasks", caption, forest, "00-forest.png")] if forest else []
    states = {state: sum(cell.state == state for cell in cells) for state in ("done", "failed", "unfinished")}
    tested = sum(bool(row.comparison and row.comparison.test) for group in found for row in group.rows)
    plots = [*overview, *itertools.chain.from_iterable(group.plots for group in found)]
    return {
        "overview": overview,
        "groups": found,
        "attentions": groups.order({cell.spec["attention"] for cell in cells}, baseline, runs),
        "runs": runs,
        "states": states,
        "diverged": sum(row.failed for group in found if group.first_metric for row in group.rows)
        - sum(c.state == "failed" for c in cells),
        "causes": store.causes(cells),
        "mixed": mixtures(cells),
        "devices": sorted({cell.result["device"] for cell in cells if cell.result}),
        "baseline": baseline,
        "family": f"{tested} comparison{'s' * (tested != 1)}",
        "created": utc(),
        "plots": plots,
        "specs": [spec for plot in plots if isinstance(plot, Chart) for spec in plot.specs],
        "places": _places(plots),
        "site": False,
    }


def _render(template: str, facts: Mapping[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("quest_bench"),
        autoescape=lambda name: bool(name and ".html" in name),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own = ["number", "with_sign", "interval", "seconds", "quote", "spread", "mean", "gain", "paper_text", "paper_words"]
    environment.filters.update({name: getattr(groups, name) for name in own})
    environment.filters.update(p=write_p, base64=lambda data: base64.b64encode(data).decode())
    environment.globals.update(last_line=store.last_line)
    return environment.get_template(template).render(facts)


def mixtures(cells: Sequence[Stored]) -> dict[str, dict[str, list[str]]]:
    """Package, "machine", "threads" or "device" -> the values of finished cells -> the attentions of these cells.

    Mixed values deserve a remark: a difference between attentions may be one between commits or machines.
    """
    found: dict[str, dict[str, set[str]]] = {}
    checkouts = {name for cell in cells if cell.result for name in cell.result.get("commits") or {}}
    for cell in cells:
        if cell.result is None:
            continue
        facts = dict(cell.result.get("versions") or {})
        commits = dict(cell.result.get("commits") or {})
        commits |= dict.fromkeys(sorted((checkouts & facts.keys()) - commits.keys()), "unknown")
        facts |= {f"commit of {name}": commit[:12] + commit[40:] for name, commit in commits.items()}
        here = cell.result.get("machine") or {}
        facts |= {"machine": f"{here['cpu']} ({here['id']})"} if here else {}
        facts |= {"threads": str(cell.result["threads"])} if cell.result.get("threads") else {}
        facts |= {"device": cell.result["device"]}
        for name, value in facts.items():
            found.setdefault(name, {}).setdefault(value, set()).add(cell.spec["attention"])
    return {name: {value: sorted(who) for value, who in values.items()} for name, values in found.items()}


@functools.cache
def _script() -> str:
    """The library that draws the charts in the page; bundling it takes over a second."""
    return _pack(javascript())


def _pack(text: str) -> str:
    """Text as base64 of gzip, which the page unpacks itself (DecompressionStream)."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _places(plots: Sequence[Chart | Picture]) -> dict[str, range]:
    """A chart's file -> the numbers of its specifications in the page."""
    found: dict[str, range] = {}
    start = 0
    for plot in plots:
        if isinstance(plot, Chart):
            found[plot.file] = range(start, start + len(plot.specs))
            start += len(plot.specs)
    return found


def _plots(group: Group, table: pd.DataFrame, prefix: str, points: int) -> list[Chart | Picture]:
    order = [row.attention for row in group.rows]
    done = [cell for cell in group.cells if cell.result is not None]
    done.sort(key=lambda cell: (order.index(cell.spec["attention"]), cell.spec["seed"]))
    if not done:
        return []

    def file(title: str) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", f"{group.task}-{title}".lower()).strip("-")
        return f"{prefix}-{slug}.png"

    caption = "Small dots are seeds; the bar is the 95% t-interval of their mean, and absent if a seed failed."
    if any(row.paper is not None for row in group.rows):
        caption += " The open diamond is the paper's figure."
    if group.suite.unit == "%":
        caption += " Bars are cut off at 0 and 100."
    title = f"{group.suite.metric} per attention"
    drawn: list[Chart | Picture] = [Chart(title, caption, [charts.scores(group)], file(title))]
    if len(group.items) > 1:
        caption = "The marker is the mean over seeds, the bar reaches from the lowest to the highest seed."
        title = f"{group.suite.metric} by item"
        drawn.append(Chart(title, caption, [charts.items(group)], file(title)))
    names = list(dict.fromkeys(name for cell in done for name in (cell.result or {})["series"]))
    measured = [name.partition("/")[0] for name in names]
    names.sort(key=lambda name: measured.index(name.partition("/")[0]))  # those of all rates together
    if names and group.first_metric:  # the other plots would be the same for every metric
        caption = (
            "Mean over seeds; the band reaches from the lowest to the highest seed. A seed that stopped early keeps "
            "its last value."
        )
        drawn.append(Chart("Over training", caption, charts.curves(group, done, names, points), file("over-training")))
    complete = all((cell.result or {}).get("details") for cell in done)
    if group.suite.plots and group.first_metric and not complete:
        group.notes.append("The suite's own plots need the cells' details, which results.parquet of this run lacks.")
    elif group.suite.plots and group.first_metric:
        module, _, function = group.suite.plots.partition(":")
        rows = table.set_index("folder").loc[[cell.folder.name for cell in done]].reset_index()
        results: list[Mapping[str, Any]] = [{**cell.spec, **(cell.result or {})} for cell in done]
        try:
            for title, caption, figure in getattr(import_module(module), function)(rows, results):
                data = io.BytesIO()
                figure.savefig(data, format="png", dpi=120, facecolor="white")
                drawn.append(Picture(title, caption, figure.get_figwidth(), data.getvalue(), file(title)))
        except Exception as error:  # the numbers are worth a report without these plots
            group.notes.append(f"The suite's own plots ({group.suite.plots}) could not be drawn: {error!r}.")
    return drawn
