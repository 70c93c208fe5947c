"""Microbenchmarks, which `quest bench` does not run: `python -m quest_research.speed speed`, and its other commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quest_bench.cli import exit_code, expanded
from quest_bench.plan import parse_attentions, portable
from quest_bench.worker import cores
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError

from . import scaling as over_lengths
from . import speed as against_peers
from . import versions as two_versions
from .common import shortened

NAME = "python -m quest_research.speed"
app = typer.Typer(name=NAME, rich_markup_mode="rich", no_args_is_help=True, add_completion=False)
Out = Annotated[
    Path | None,
    typer.Option("--out", parser=expanded, metavar="DIR", help="Write the page and its JSON into this folder."),
]


def typed(context: typer.Context) -> str:
    """The command as it was typed, without the user's home folder in it."""
    return portable([*NAME.split(), *context.obj])


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--threads is {text!r}; write numbers, for example 1,2,4") from None


def _shape(text: str) -> against_peers.Shape:
    try:
        batch, heads, n, dim = map(int, text.split(","))
    except ValueError:
        raise ConfigError(f"--shape is {text!r}; write B,H,N,D, for example 4,8,512,64") from None
    return batch, heads, n, dim


@app.command()
def speed(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions without groupings.")] = "quest,standard",
    out: Out = None,
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

    [cyan]python -m quest_research.speed speed --out research/results/speed-cpu[/]
    """
    numbers = None if threads is None else _numbers(threads)
    plan = against_peers.Plan(attentions=tuple(parse_attentions(attention)), rounds=rounds)
    if shape:
        plan = replace(plan, shapes=tuple(map(_shape, shape)), linear_shape=None)
    if padded:
        plan = replace(plan, layouts=("contiguous", "padded"), linear_shape=None)
    if smoke:
        plan, numbers = plan.smoke(), numbers or [1]
    print(against_peers.run(plan, out, threads=numbers, command=typed(context)))


@app.command()
def scaling(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions.")] = over_lengths.DEFAULT,
    out: Out = None,
    longest: Annotated[int, typer.Option(help="The longest sequence, up to 16384 tokens.")] = 16384,
    smoke: Annotated[bool, typer.Option("--smoke", help="Up to 512 tokens; the numbers mean nothing.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; without it, one a core.")] = None,
) -> None:
    """Measure how time and memory grow with the length, from 256 to 16384 tokens, with fitted exponents and a plot.

    Example:

    [cyan]python -m quest_research.speed scaling --out research/results/scaling-cpu[/]
    """
    chosen = parse_attentions(attention)
    if smoke:  # tables of positions take a gigabyte at 16384
        longest, threads = min(longest, 512), threads or 1
        chosen = [str(shortened(AttentionConfig.parse(one), 512)) for one in chosen]
    print(over_lengths.run(chosen, out, threads=threads or cores(), longest=longest, command=typed(context)))


@app.command()
def versions(
    context: typer.Context,
    before: Annotated[str, typer.Option(metavar="PYTHON", help="The interpreter that imports the old quest_core.")],
    out: Out = None,
    threads: Annotated[str, typer.Option(metavar="N,...", help="CPU threads.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=2, help="How often each version takes its turn in a cell.")] = 15,
) -> None:
    """Time this quest_core against another one, in turns: calls of every mechanism, decoding, training steps.

    Example:

    [cyan]python -m quest_research.speed versions --before ../old/.venv/bin/python[/]
    """
    print(two_versions.run(before, out, threads=_numbers(threads), rounds=rounds, command=typed(context)))


def app_main(argv: list[str]) -> int:
    """Run a microbenchmark. Returns 0, 2 for a wrong command, and 128 plus the signal's number after a signal."""
    return exit_code(app, argv, NAME)


if __name__ == "__main__":
    sys.exit(app_main(sys.argv[1:]))
