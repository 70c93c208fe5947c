"""Writes the tables of the README and of docs/ from what mechanisms declare and what tests have run.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if what is there differs
"""

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
    """The page about the report of an entry, by its path from the root."""
    folder = RESULTS / entry["report"]
    while not (folder / "README.md").exists():
        folder = folder.parent
    return f"{folder.relative_to(ROOT)}/README.md"


COMPARISONS = {
    "readme": (
        "| QUEST − standard | paper | our model | seeds | ours (95 % interval) |\n|---|---:|---|--:|--:|",
        "| {label} | {paper} | [{model}]({study}) | {seeds} | {effect} |",
        ("quest", "standard"),
    ),
    "choosing": (
        "| you train | seeds | `quest` − `standard` |\n|---|--:|--:|",
        "| [{label}](../{study}) | {seeds} | {effect} |",
        ("quest", "standard"),
    ),
    "start": (
        "| you train | write | `quest(init=12)` − `quest` |\n|---|---|--:|",
        "| [{label}](../{study}) | {write} | {effect} |",
        ("quest(init=12.0)", "quest"),
    ),
    "claims": (
        "| claim | paper | our model | seeds | ours (95 % interval) | what settles it |\n|---|---|---|--:|--:|---|",
        "| {claim} | {paper} | [{model}](../{study}) | {seeds} | {effect} | {settles} |",
        ("quest", "standard"),
    ),
}
"""Page of evidence.toml -> the head of its table, a line, and what is compared unless an entry names it."""


def comparisons(page: str) -> str:
    """The entries of a page, each with its difference."""
    head, line, (plus, minus) = COMPARISONS[page]
    lines = [head]
    for entry in evidence(page):
        found = row(entry, entry.get("attention", plus), entry.get("minus", minus))
        facts = {"study": study(entry), "seeds": found.finished if found else 0, "effect": effect(found)}
        lines.append(line.format(**entry, **facts))
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


TABLES = {"support": support, "mechanisms": formulas, "transforms": transforms}
TABLES |= {"zoo": lambda: formulas(zoo()), "widths": widths}
TABLES |= {page: functools.partial(comparisons, page) for page in COMPARISONS}
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
