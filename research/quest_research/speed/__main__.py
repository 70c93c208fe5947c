"""The time of attentions against their peers, which `quest bench` does not run: `python -m quest_research.speed`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quest_bench.cli import exit_code, expanded
from quest_bench.plan import parse_attentions, portable
from quest_core.errors import ConfigError

from .speed import Plan, run

NAME = "python -m quest_research.speed"
app = typer.Typer(name=NAME, rich_markup_mode="rich", add_completion=False)


def _numbers(text: str, option: str, example: str, count: int | None = None) -> Any:
    """Return the numbers of an option, `count` of them if that is given."""
    found = text.split(",")
    if all(number.isdecimal() for number in found) and count in (None, len(found)):
        return tuple(map(int, found))
    raise ConfigError(f"{option} is {text!r}; write {example}")


@app.command()
def speed(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions without groupings.")] = "quest,standard",
    out: Annotated[
        Path | None, typer.Option(parser=expanded, metavar="DIR", help="The folder of the page and its JSON.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="CPU threads; without it, 1,2,4 up to the number of cores.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="How often each contender takes its turn.")] = 31,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B,H,N,D", help="In place of the usual ones; may be repeated.")
    ] = None,
    padded: Annotated[bool, typer.Option("--padded", help="With padding, in place of the packed layout.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Small sizes, one thread; the numbers mean nothing.")] = False,
) -> None:
    """Time attentions against their peers in PyTorch, in turns within one run.

    The peer is scaled_dot_product_attention. quest in three lines takes turns too; linear has its naive formula.

    Example:

    [cyan]python -m quest_research.speed --out research/results/speed-cpu[/]
    """
    chosen = list(_numbers(threads, "--threads", "numbers, for example 1,2,4")) if threads else None
    plan = Plan(attentions=tuple(parse_attentions(attention)), rounds=rounds)
    if shape:
        shapes = tuple(_numbers(one, "--shape", "B,H,N,D, for example 4,8,512,64", 4) for one in shape)
        plan = replace(plan, shapes=shapes, linear_shape=None)
    if padded:
        plan = replace(plan, layouts=("contiguous", "padded"), linear_shape=None)
    if smoke:
        plan, chosen = plan.smoke(), chosen or [1]
    print(run(plan, out, threads=chosen, command=portable([*NAME.split(), *context.obj])))


if __name__ == "__main__":
    sys.exit(exit_code(app, sys.argv[1:], NAME))
