"""Writes the tables of the README and of docs/ from what mechanisms declare and what tests have run.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if what is there differs
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devtools.support import zoo
from quest_bench.groups import Group, Row, read_groups
from quest_core.cli.mechanisms import AXIS_TITLES
from quest_core.registry import Component, mechanisms, owner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "research" / "results"
BEGIN, END = "<!-- generated: {} -->", "<!-- end of generated -->"


def support() -> str:
    """Frameworks across, mechanisms down, from what the tests of each plugin have run."""
    files = [ROOT / "tests" / "support.json", *sorted(ROOT.glob("plugins/quest-*/tests/support.json"))]
    columns = [json.loads(path.read_text()) for path in files]
    settings: list[str] = []

    def cell(said: str) -> str:
        if said.startswith("with "):
            if said not in settings:
                settings.append(said)
            return str(settings.index(said) + 1)
        return {"works": "✓", "refused": "–"}[said]

    lines = ["| | " + " | ".join(column["host"] for column in columns) + " |", "|---|" + ":-:|" * len(columns)]
    theirs = {part.name for part in zoo()}
    first = next(name for name in columns[0]["mechanisms"] if name in theirs)
    for name in columns[0]["mechanisms"]:
        lines += ["| *quest-zoo* |" + " |" * len(columns)] if name == first else []
        lines.append(f"| `{name}` | " + " | ".join(cell(column["mechanisms"][name]) for column in columns) + " |")
    lines += ["", "✓ trains in the framework's default model · – refused, with the reason", ""]
    return "\n".join(lines + [f"{i}. {setting}" for i, setting in enumerate(settings, 1)])


def formulas(parts: Iterable[type[Component]] = ()) -> str:
    """One table for each axis, of `parts`, or of the core's with their costs."""
    own = [part for part in mechanisms().values() if owner(part) == "quest-core"]
    blocks = []
    for axis, title in AXIS_TITLES.items():
        rows = [_row(part, costs=not parts) for part in parts or own if part.axis == axis]
        if rows:
            names = list(rows[0])
            blocks += [f"### {title}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            blocks += [f"| {' | '.join(row.values())} |" for row in rows]
            blocks.append("")
    return "\n".join(blocks).rstrip()


def _row(part: type[Component], costs: bool) -> dict[str, str]:
    options = ", ".join(f"`{o.name}` = {'null' if o.default is None else str(o.default).lower()}" for o in part.options)
    cells = {"name": f"`{part.name}`", "formula": part.formula(), "options": options or "–"}
    cells |= {"causal": "✓" if part.causal else "–"} if costs else {}
    cells |= {"parameters": "yes" if part.learnable else "–"}
    cells |= {"cost": part.complexity} if costs else {}
    return cells | {"source": part.source}


def transforms() -> str:
    """Transforms across, mechanisms down, from what tests/grid has run."""
    found = json.loads((ROOT / "tests" / "grid" / "outcomes.json").read_text())
    columns = list(next(iter(found["rows"].values())))
    reasons: list[str] = []

    def cell(said: dict[str, str]) -> str:
        if said["state"] == "right":
            return f"✓ {said['note']}" if "note" in said else "✓"
        if said["state"] == "wrong":
            return "✗"
        if said["reason"] not in reasons:
            reasons.append(said["reason"])
        number = reasons.index(said["reason"]) + 1
        return {"refused": f"{number}", "refused if causal": f"causal: {number}"}.get(said["state"], f"some: {number}")

    lines = [
        f"PyTorch {found['torch']}, CPU.",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---|" + ":-:|" * len(columns),
    ]
    lines += [
        f"| `{name}` | " + " | ".join(cell(row[column]) for column in columns) + " |"
        for name, row in found["rows"].items()
    ]
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))])


# --- comparisons ------------------------------------------------------------------------------------------------------


@functools.cache
def groups(report: str, baseline: str) -> list[Group]:
    """The tables of a report, whose comparisons with `baseline` are corrected over the report."""
    return read_groups(RESULTS / report, baseline)


def row(entry: dict[str, Any], attention: str, baseline: str = "standard") -> Row | None:
    """The comparison of one attention that an entry of evidence.toml names; None if it was not run."""
    wanted = [
        group
        for group in groups(entry["report"], baseline)
        if entry.get("task", group.task) == group.task and entry.get("settings", group.settings) == group.settings
        if (entry["metric"] == group.suite.metric if "metric" in entry else group.first_metric)
    ]
    if len(wanted) != 1:
        raise SystemExit(f"evidence.toml: {entry} names {len(wanted)} tables of its report, not one")
    found = wanted[0].row(attention)
    return found if found and found.difference else None


def effect(found: Row | None) -> str:
    """A difference with its 95 % interval, in bold if it is significant."""
    if found is None or found.difference is None:
        return "–"
    ends = (found.difference.mean, found.difference.low, found.difference.high)
    largest = max(map(abs, ends))
    digits = 4 if largest < 0.01 else 2 if largest < 1 else 1
    mean, low, high = (f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−") for x in ends)
    text = f"{'' if mean.startswith('−') else '+'}{mean} ({low} to {high})"
    return f"**{text}**" if found.mark else text


def evidence(page: str) -> list[dict[str, Any]]:
    """The entries of evidence.toml for a page."""
    return tomllib.loads((ROOT / "docs" / "evidence.toml").read_text())[page]  # type: ignore[no-any-return]


def study(entry: dict[str, Any]) -> str:
    """The page about the report of an entry, by its path from docs/."""
    folder = RESULTS / entry["report"]
    while not (folder / "README.md").exists():
        folder = folder.parent
    return f"../{folder.relative_to(ROOT)}/README.md"


def readme() -> str:
    """The paper's difference and ours."""
    lines = ["| QUEST − standard | paper | our model | seeds | ours (95 % interval) |", "|---|---:|---|--:|--:|"]
    for entry in evidence("readme"):
        found = row(entry, "quest")
        seeds = found.finished if found else 0
        model = f"[{entry['model']}]({study(entry).removeprefix('../')})"
        lines.append(f"| {entry['label']} | {entry['paper']} | {model} | {seeds} | {effect(found)} |")
    return "\n".join(lines)


def choosing() -> str:
    """Differences from standard attention."""
    lines = ["| you train | seeds | `quest` − `standard` |", "|---|--:|--:|"]
    for entry in evidence("choosing"):
        found = row(entry, "quest")
        label = f"[{entry['label']}]({study(entry)})"
        lines.append(f"| {label} | {found.finished if found else 0} | {effect(found)} |")
    return "\n".join(lines)


def widths() -> str:
    """Differences from standard attention by the features of a head."""
    entries = evidence("widths")
    columns = sorted({name for entry in entries for name in entry if name.isdigit()}, key=int)
    lines = ["| heads of | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for entry in entries:
        cells = [effect(row(entry | entry[name], "quest")) if name in entry else "–" for name in columns]
        lines.append(f"| {entry['label']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def start() -> str:
    """Differences of an initial query norm of 12 from none."""
    lines = ["| you train | write | `quest(init=12)` − `quest` |", "|---|---|--:|"]
    for entry in evidence("start"):
        label = f"[{entry['label']}]({study(entry)})"
        write = entry["write"] if " " in entry["write"] else f"`{entry['write']}`"
        found = effect(row(entry, "quest(init=12.0)", "quest"))
        lines.append(f"| {label} | {write} | {found} |")
    return "\n".join(lines)


def claims() -> str:
    """What papers say, what we measured, and what would settle it."""
    lines = [
        "| claim | paper | our model | seeds | ours (95 % interval) | what settles it |",
        "|---|---|---|--:|--:|---|",
    ]
    for entry in evidence("claims"):
        found = row(entry, entry.get("attention", "quest"), entry.get("minus", "standard"))
        seeds = found.finished if found else 0
        ours = f"[{entry['model']}]({study(entry)}) | {seeds} | {effect(found)}"
        lines.append(f"| {entry['claim']} | {entry['paper']} | {ours} | {entry['settles']} |")
    return "\n".join(lines)


TABLES = {"support": support, "mechanisms": formulas, "transforms": transforms}
TABLES |= {"zoo": lambda: formulas(zoo()), "readme": readme, "choosing": choosing, "widths": widths}
TABLES |= {"start": start, "claims": claims}
PLACES = {
    ROOT / "README.md": ("readme",),
    ROOT / "docs" / "choosing.md": ("choosing", "widths"),
    ROOT / "docs" / "claims.md": ("claims",),
    ROOT / "docs" / "start.md": ("start",),
    ROOT / "docs" / "mechanisms.md": ("mechanisms", "support"),
    ROOT / "docs" / "transforms.md": ("transforms",),
    ROOT / "plugins" / "quest-zoo" / "README.md": ("zoo",),
}


def rendered(path: Path) -> str:
    """The file's text with every generated block brought up to date."""
    text = path.read_text()
    for name in PLACES[path]:
        head, begin, rest = text.partition(BEGIN.format(name))
        _, end, tail = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{path.name} has no block '{BEGIN.format(name)}' ... '{END}'")
        text = f"{head}{begin}\n{TABLES[name]()}\n{end}{tail}"
    return text


def main(arguments: list[str]) -> int:
    stale = [path for path in PLACES if path.read_text() != rendered(path)]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(rendered(path))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
