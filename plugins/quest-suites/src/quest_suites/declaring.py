"""What suites are declared with. Standard library only, because `quest bench ls` imports no framework."""

import json
from pathlib import Path
from typing import Any

Option = dict[str, Any]


def whole(name: str, default: int | None, doc: str, minimum: int = 1, **more: Any) -> Option:
    return {"name": name, "kind": "int", "default": default, "doc": doc, "minimum": minimum, **more}


def number(name: str, default: float, doc: str, minimum: float = 0) -> Option:
    return {"name": name, "kind": "float", "default": default, "doc": doc, "minimum": minimum}


def choice(name: str, choices: tuple[str, ...], doc: str) -> Option:
    """Return an option that is one of several texts, the first by default."""
    return {"name": name, "kind": "str", "default": choices[0], "choices": choices, "doc": doc}


def text(name: str, doc: str, default: str | None = "") -> Option:
    """Return an option that is any text; `null` is one too if it is the default."""
    option = {"name": name, "kind": "str", "default": default, "doc": doc}
    return option if default is not None else {**option, "nullable": True}


def timing_suite(summary: str, tasks: list[str], rounds: int, *options: Option, least: bool = False) -> dict[str, Any]:
    """Return a suite whose function returns that of `quest_suites.timing.time_in_turns`.

    With `least`, reports also have a table of the least time.
    """
    also = (["least time of stock"] if least else []) + ["memory of stock"]
    return {
        "summary": summary,
        "tasks": tasks,
        "metric": "time of stock",
        "jobs": 1,
        "higher_is_better": False,
        "selection": "none",
        "also": [{"metric": metric} for metric in also],
        "options": [*options, whole("rounds", rounds, "how often each step is timed", 2)],
    }


RATES: list[dict[str, Any]] = [
    {"metric": "best accuracy"},
    {"metric": "range", "unit": "decades"},
    {"metric": "diverged", "unit": "rates", "higher_is_better": False},
]
"""The further metrics of `quest_suites.contract.over_rates`, as the key "also" declares them."""


def papers(file: str) -> dict[str, Any]:
    """Return the tables of a paper by suite, from the paper.json in the folder of `file`."""
    found: dict[str, Any] = json.loads(Path(file).with_name("paper.json").read_text(encoding="utf-8"))
    return found
