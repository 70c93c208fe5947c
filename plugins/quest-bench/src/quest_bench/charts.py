"""The charts of a report as Vega-Lite specifications: drawn by the page itself, and as PNG for Markdown."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import vl_convert

from .groups import Group
from .store import Stored

POINTS = 12_000
"""Points of all lines of a report together; each line gets its share, at least 40 and at most 200."""

COLOURS = ("#5f6b7a", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3aa6d0", "#882255")
"""The baseline is grey; the rest follow Okabe and Ito's palette, which color-blind eyes distinguish."""
DARK = ("#a3adba", "#4ea8e0", "#f0803c", "#2fc496", "#d283c3", "#d9ab3a", "#7cc8e8", "#d4779e")
DASHES = ([1, 0], [6, 3], [2, 2])
"""Patterns of lines: the palette's first round is drawn with the first pattern, and so on."""


def theme(dark: bool) -> dict[str, Any]:
    """The Vega-Lite configuration of both reports. No text is smaller than 12 pixels."""
    ink, grid = ("#e6e8eb", "#343a42") if dark else ("#1f2328", "#d8dbe0")
    text = {"labelFontSize": 12, "titleFontSize": 12, "labelColor": ink, "titleColor": ink, "labelLimit": 240}
    return {
        "background": None,
        "font": 'system-ui, -apple-system, "Segoe UI", sans-serif',
        "axis": {**text, "gridColor": grid, "domainColor": ink, "tickColor": ink, "titleFontWeight": "normal"},
        "legend": {**text, "orient": "top", "direction": "horizontal", "columns": 2, "title": None},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "text": {"fontSize": 12, "color": ink},
        "rule": {"color": ink},
        "view": {"stroke": None},
        "range": {"category": list(DARK if dark else COLOURS)},
    }


@dataclass(frozen=True)
class Chart:
    """A figure of both reports: Vega-Lite specifications side by side, and the name of the PNG in report/."""

    title: str
    caption: str
    specs: Sequence[Mapping[str, Any]]
    file: str

    def png(self) -> bytes:
        """The figure as a picture for Markdown."""
        parts = [{**spec, "width": 420 if len(self.specs) == 1 else 270} for spec in self.specs]
        spec = parts[0] if len(parts) == 1 else {"concat": parts, "columns": 3}
        light = {**theme(False), "background": "white", "font": "sans-serif"}
        return bytes(vl_convert.vegalite_to_png(json.dumps({**spec, "config": light, "padding": 8}), scale=1.5))


@dataclass(frozen=True)
class Picture:
    """A figure that a suite draws itself."""

    title: str
    caption: str
    width: float  # in inches
    data: bytes
    file: str

    def png(self) -> bytes:
        return self.data


def _round(value: float, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _color(names: Sequence[str], legend: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"field": "attention", "type": "nominal", "scale": {"domain": list(names)}}
    return found if legend else {**found, "legend": None}


def _layer(mark: str, looks: Mapping[str, Any], values: Sequence[Any] | None = None, **encoding: Any) -> dict[str, Any]:
    """Return a mark with its looks, on data of its own or on that of the chart."""
    layer = {"mark": {"type": mark, **looks}, "encoding": encoding}
    return layer if values is None else {**layer, "data": {"values": list(values)}}


def _tooltip(*names: str) -> list[dict[str, str]]:
    return [{"field": name} for name in names]


def scores(group: Group) -> dict[str, Any]:
    """Seeds, mean and interval of each attention."""
    names = [row.attention for row in group.rows]
    means: list[dict[str, Any]] = []
    for row in group.rows:
        one: dict[str, Any] = {"attention": row.attention, "mean": _round(row.score.mean, 6), "paper": row.paper}
        if row.score.has_interval and not row.failed:
            low, high = row.score.low, row.score.high
            if group.suite.unit == "%" and 0 <= row.score.mean <= 100:  # few seeds can have hundreds of percent
                low, high = max(low, 0), min(high, 100)
            one |= {"low": _round(low, 6), "high": _round(high, 6)}
        means.append(one)
    seeds = [
        {"attention": row.attention, "seed": seed, "value": _round(value, 6)}
        for row in group.rows
        for seed, value in row.values.items()
        if math.isfinite(value)
    ]
    x = {"type": "quantitative", "scale": {"zero": False}, "title": group.suite.measured}
    y = {"field": "attention", "type": "nominal", "sort": names, "title": None}
    common: dict[str, Any] = {"y": y, "color": _color(names)}
    dots, point = {"opacity": 0.6, "size": 36, "yOffset": 9}, {"filled": True, "size": 90}
    tips = [_tooltip("attention", "seed", "value"), _tooltip("attention", "mean", "low", "high")]
    layers = [
        _layer("rule", {"strokeWidth": 3}, means, x={**x, "field": "low"}, x2={"field": "high"}, **common),
        _layer("circle", dots, seeds, x={**x, "field": "value"}, tooltip=tips[0], **common),
        _layer("point", point, means, x={**x, "field": "mean"}, tooltip=tips[1], **common),
    ]
    if printed := [one for one in means if one["paper"] is not None]:
        looks = {"shape": "diamond", "size": 90, "filled": False, "color": "#808890"}
        place = {"x": {**x, "field": "paper"}, "y": common["y"]}
        layers.append(_layer("point", looks, printed, tooltip=_tooltip("paper"), **place))
    return {"width": "container", "height": 34 * len(names), "layer": layers}


def items(group: Group) -> dict[str, Any]:
    """Mean and range of seeds for each item of the metric."""
    names = [row.attention for row in group.rows]
    values = [
        {
            "item": item.name,
            "attention": name,
            "mean": _round(item.estimates[name].mean),
            "low": _round(item.estimates[name].minimum),
            "high": _round(item.estimates[name].maximum),
        }
        for item in group.items
        for name in names
        if item.estimates[name].n
    ]
    return _ranges(values, "item", group.suite.measured, names, _color(names, legend=True))


def _ranges(
    values: Sequence[Mapping[str, Any]], rows: str, title: str, names: Sequence[str], color: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a chart with a row for each value of the field `rows`: the mean and the range of each attention."""
    y = {"field": rows, "type": "nominal", "sort": None, "title": None}
    x = {"type": "quantitative", "scale": {"zero": False}, "title": title}
    common: dict[str, Any] = {"y": y, "yOffset": {"field": "attention", "sort": list(names)}, "color": color}
    point, tips = {"filled": True, "size": 60}, _tooltip(*values[0])
    return {
        "width": "container",
        "height": (16 + 10 * len(names)) * len({value[rows] for value in values}),
        "data": {"values": list(values)},
        "layer": [
            _layer("rule", {"strokeWidth": 2.5}, x={**x, "field": "low"}, x2={"field": "high"}, **common),
            _layer("point", point, x={**x, "field": "mean"}, tooltip=tips, **common),
        ],
    }


def curves(group: Group, done: Sequence[Stored], names: Sequence[str], points: int) -> list[dict[str, Any]]:
    """One chart a series: the mean over seeds and the band from the lowest to the highest seed.

    A seed that stopped early keeps its last value, so that the mean does not jump where it ends. The axis of positive
    values that span two decades is logarithmic.
    """
    attentions = [row.attention for row in group.rows]
    x = {"field": "x", "type": "quantitative", "title": "recorded point", "axis": {"tickMinStep": 1, "grid": False}}
    color = _color(attentions, legend=True)  # in both layers: a null in one removes the other's legend
    color["legend"] = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2}
    pattern = [DASHES[place // len(COLOURS) % len(DASHES)] for place in range(len(attentions))]
    dashes = {**color, "scale": {"domain": attentions, "range": pattern}}
    line = {"strokeWidth": 1.6, "tooltip": True}
    charts = []
    for name in names:
        values = []
        for attention in attentions:
            own = [cell.result for cell in done if cell.result and cell.spec["attention"] == attention]
            if found := [result["series"][name] for result in own if len(result["series"].get(name, ()))]:
                values += _band(attention, found, points)
        lowest = min((one.get("low", one["mean"]) for one in values), default=0)
        wide = lowest > 0 and max(one.get("high", one["mean"]) for one in values) > 100 * lowest
        y = {"type": "quantitative", "scale": {"type": "log"} if wide else {"zero": False}, "title": None}
        layers = [
            _layer("area", {"opacity": 0.16}, x=x, y={**y, "field": "low"}, y2={"field": "high"}, color=color),
            _layer("line", line, x=x, y={**y, "field": "mean"}, color=color, strokeDash=dashes),
        ]
        size = {"width": "container", "height": 200}
        charts.append({"title": name.replace("_", " "), **size, "data": {"values": values}, "layer": layers})
    return charts


def _band(attention: str, found: Sequence[Sequence[float]], points: int) -> list[dict[str, Any]]:
    longest = max(map(len, found))
    kept = np.unique(np.linspace(0, longest - 1, min(points, longest)).round().astype(int))
    wide = np.array([[curve[min(i, len(curve) - 1)] for i in kept] for curve in found], dtype=float)
    wide[~np.isfinite(wide)] = np.nan
    values = []
    for place, column in zip(kept, wide.T, strict=True):
        finite = column[np.isfinite(column)]
        if len(finite):
            one = {"attention": attention, "x": int(place) + 1, "mean": _round(float(finite.mean()))}
            if len(found) > 1:
                one |= {"low": _round(float(finite.min())), "high": _round(float(finite.max()))}
            values.append(one)
    return values


def share(groups: Sequence[Group]) -> int:
    """How many points a line of the report may have."""
    lines = 0
    for group in groups:
        if group.first_metric:
            series = {name for cell in group.cells if cell.result for name in cell.result["series"]}
            lines += len(series) * len(group.rows)
    return max(40, min(200, POINTS // max(lines, 1)))


def forest(groups: Sequence[Group], baseline: str) -> list[dict[str, Any]]:
    """Return paired differences of all tasks: one chart for each metric, whose tasks share an axis.

    A lower-is-better metric changes its sign. Empty if there are fewer than two tasks.
    """
    values: dict[str, list[dict[str, Any]]] = {}
    for group, row in itertools.chain.from_iterable(((group, row) for row in group.rows) for group in groups):
        one = row.comparison
        if one is None or not one.difference.n:
            continue
        sign = 1 if group.suite.higher_is_better else -1
        ends = sorted((sign * one.difference.low, sign * one.difference.high))
        unit = f", {group.points}" if group.points else ""
        title = f"{group.suite.metric}{unit}{'' if sign > 0 else ', lower is better, sign changed'}"
        values.setdefault(title, []).append(
            {
                "task": group.title,
                "attention": row.attention,
                "mean": _round(sign * one.difference.mean),
                "low": None if one.test == "sign" else _round(ends[0]),
                "high": None if one.test == "sign" else _round(ends[1]),
                "words": row.verdict,
            }
        )
    if len({value["task"] for rows in values.values() for value in rows}) < 2:
        return []
    domain = list(dict.fromkeys([baseline, *(str(value["attention"]) for rows in values.values() for value in rows)]))
    color = {**_color(domain, legend=True), "legend": {"values": domain[1:]}}
    charts = [_ranges(rows, "task", f"difference in {title}", domain[1:], color) for title, rows in values.items()]
    for chart in charts:
        chart["layer"].insert(0, _layer("rule", {"strokeDash": [3, 3]}, x={"datum": 0}))
    return charts
