"""QUEST against standard attention in a few minutes: a small Vision Transformer on real images, at two learning rates.

::

    python -m quest_research.demo --out runs/demo

The images are the handwritten digits of scikit-learn. The first sentence that is printed is computed from the cells.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quest_bench.cli import app_main, exit_code, expand_home
from quest_bench.groups import Group, join, mean, number, read_groups
from quest_bench.plan import parse_seeds
from quest_bench.report import write_report

SUITE = "images/digits"
ATTENTIONS = ["standard", "quest"]
BAR = 20
"""Characters of a bar of 100 %."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(parser=expand_home, metavar="DIR", help="Where results and report go.")] = Path(
        "runs/demo"
    ),
    seeds: Annotated[str, typer.Option(help="Seeds: 0-4 or 0,3,7.")] = "0-7",
) -> None:
    """Run the demonstration and write its report. The same command again resumes.

    Further options are those of `quest bench run`, such as --jobs and --set.
    """
    command = ["run", SUITE, "--attention", ",".join(ATTENTIONS), "--seeds", seeds, "--out", str(out)]
    status = app_main([*command, *context.args])
    if status > 1:
        raise typer.Exit(status)
    groups = read_groups(out, "standard")
    path = write_report(out, "standard")
    console.print(Text(f"\n{finding(groups, len(parse_seeds(seeds)))}\n", style="bold"), soft_wrap=True)
    console.print(chart(groups))
    console.print(f"\nreport with pictures: {path}", markup=False, soft_wrap=True)
    raise typer.Exit(status)


def finding(groups: Sequence[Group], seeds: int) -> str:
    """Return the result of the cells in one sentence."""
    found = [f"at {group.task.replace('lr=', 'learning rate ')} {group.conclusion.rstrip('.')}" for group in groups]
    last = groups[-1]
    logits = [f"{number(largest_logit(last, name))} with {name}" for name in ATTENTIONS]
    return (
        f"A small Vision Transformer on handwritten digits, {seeds} seeds: {'; '.join(found)}; "
        f"the largest logit ends at {join(logits)} attention at {last.task.replace('lr=', '')}."
    )


def largest_logit(group: Group, attention: str) -> float:
    """Return the median over seeds of the largest logit after the last epoch; NaN if no cell has one."""
    own = [cell.result for cell in group.cells if cell.spec["attention"] == attention]
    found = [result["series"]["max_logit"][-1] for result in own if result and result["series"].get("max_logit")]
    return statistics.median(found) if found else float("nan")


def chart(groups: Sequence[Group]) -> Table:
    """Return a table of test accuracies with bars and 95 % intervals, and of largest logits."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "attention", "", "accuracy, %", "largest logit"):
        table.add_column(heading, justify="right" if heading == "largest logit" else "left", no_wrap=True)
    for group in groups:
        for row in group.rows:
            score = row.score.mean if row.score.mean == row.score.mean else 0.0
            bar = Text("█" * round(BAR * score / 100), style="green" if row.attention == "quest" else "dim")
            logit = number(largest_logit(group, row.attention))
            table.add_row(group.task, row.attention, bar, mean(row), logit)
    return table


def main(argv: list[str]) -> int:
    """Run the demonstration. Returns 0, 1 when cells failed, 2 for a wrong command, 130 when interrupted."""
    return exit_code(app, argv, "python -m quest_research.demo")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
