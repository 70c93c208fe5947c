"""QUEST against standard attention in a few minutes: real time series in tsai's own trainer, and the paper's toy.

::

    python -m quest_bench.demo --python tsai=PATH --out runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cli import execute, exit_code, expanded
from .groups import read_groups
from .plan import Plan, catalogue, parse_settings, select
from .report import write_report
from .run import Runner
from .worker import cores

STEPS = (
    ("ts/uea/JapaneseVowels", ["standard", "quest"], [0, 1, 2], ["epochs=12"]),
    ("toy/spurious", ["standard", "quest"], [0, 1, 2], ["weight_seeds=1"]),
)
"""Suite, attentions, seeds and settings: shortened until everything fits into a few minutes on two cores."""

console = Console(highlight=False)


def demo(
    out: Annotated[Path, typer.Option(parser=expanded, metavar="DIR", help="Where results and report go.")] = Path(
        "runs/demo"
    ),
    python: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="PLUGIN=PATH", help="The python of a plugin's own environment."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time; without it, as many as cores.")] = None,
) -> None:
    """Run the demonstration and write its report. The same command again resumes."""
    available = catalogue(python or [])
    plans = []
    for selector, attentions, seeds, settings in STEPS:  # all are checked before anything runs
        suite, tasks = select(available, selector)
        plans.append(Plan(suite, tasks, attentions, seeds, parse_settings(suite, settings)))
    words = ["python", "-m", "quest_bench.demo", "--out", str(out)]
    words += [word for text in python or [] for word in ("--python", text)]
    failed = False
    for plan in plans:
        runner = Runner(plan.suite, available.python(plan.suite), console, jobs=jobs or cores(), threads=1)
        outcome = execute(plan, out, runner, words)
        if outcome.stopped:
            raise typer.Exit(128 + outcome.stopped)
        failed = failed or bool(outcome.failed)
    for group in read_groups(out, "standard"):
        unit = f" ({group.suite.unit})" if group.suite.unit else ""
        table = Table(title=f"\n{group.title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
        headings = ("attention", "seeds", group.suite.metric + unit, "difference, paired", "paper", "in words")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if 0 < index < 5 else "left")
        for row in group.rows:
            table.add_row(*map(Text, row.words()))
        console.print(table)
    console.print("\nShortened runs and few seeds: the intervals say how little they settle.", style="dim")
    console.print(f"report: {write_report(out, 'standard')}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def main(argv: list[str]) -> int:
    """Run the demonstration. Returns 0, 1 when cells failed, 2 for a wrong command, 130 when interrupted."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    return exit_code(app, argv, "python -m quest_bench.demo")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
