"""The page of quest watch: curves of what was measured, and what the latest values mean."""

import html
import io
import json
import math
from pathlib import Path
from typing import Any

from .watch import PAGE, remarks

RECORD = "watch.jsonl"
"""A line for each measurement: {"step": 100, "layers": what `Monitor.collect` returned}."""
PANELS = {
    "max_logit": "largest logit",
    "entropy": "entropy of the weights, in nats",
    "query_norm_max": "largest norm of a query, the bound of quest's logits",
    "key_norm_max": "largest norm of a key",
}
STYLE = "body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 1em}svg{max-width:100%;height:auto}"


def draw(folder: Path) -> Path | None:
    """Write ``watch.html`` into the `folder` of the measurements; return it, or None if nothing was measured."""
    path = folder / RECORD
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not records:
        return None
    before, now = [{"step": 0, "layers": {}}, *records][-2:]
    words = remarks(now["layers"], before["layers"], now["step"] - before["step"])
    said = "".join(f"<li>{html.escape(line)}</li>" for line in words)
    page = folder / "watch.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>Attention while training</title><style>{STYLE}</style>"
        f"<h1>Attention while training</h1><p>Step {now['step']}. <a href='{PAGE}'>What the numbers mean</a></p>"
        f"<ul>{said}</ul>{_svg(records)}"
    )
    return page


def _svg(records: list[dict[str, Any]]) -> str:
    """Return a panel for each number: a line for each layer, the head with the largest value (entropy: the least)."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 7), layout="constrained")
    paths = list(dict.fromkeys(path for record in records for path in record["layers"]))
    for axes, (name, title) in zip(made.subplots(2, 2).flat, PANELS.items(), strict=True):
        pick = min if name == "entropy" else max
        for i, path in enumerate(paths):
            values = [(record["step"], record["layers"].get(path, {}).get(name, [])) for record in records]
            real = [(step, [x for x in heads if not math.isnan(x)]) for step, heads in values]
            points = [(step, pick(heads)) for step, heads in real if heads]
            if points:
                axes.plot(*zip(*points, strict=True), ".-", color=colormaps["viridis"](i / len(paths)), label=path)
        axes.set(title=title, xlabel="step", yscale="linear" if name == "entropy" else "log")
    made.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    out = io.StringIO()
    made.savefig(out, format="svg")
    return out.getvalue()[out.getvalue().index("<svg") :]
