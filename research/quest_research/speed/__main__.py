"""Microbenchmarks, which `quest bench` does not run: `python -m quest_research.speed speed`, and its other commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from quest_bench.cli import Device, exit_code, expanded, parse_attentions, portable
from quest_bench.worker import cores
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError

from .common import shortened

NAME = "python -m quest_research.speed"
app = typer.Typer(name=NAME, rich_markup_mode="rich", no_args_is_help=True, add_completion=False)


def typed(context: typer.Context) -> str:
    """The command as it was typed, without the user's home folder in it."""
    return portable([*NAME.split(), *context.obj])


@app.command()
def speed(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions without groupings.")] = "quest,standard",
    out: Annotated[
        Path | None,
        typer.Option(parser=expanded, metavar="DIR", help="Write speed.md and speed.json into this folder."),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="CPU threads; without it, 1,2,4 up to the number of cores.")
    ] = None,
    layouts: Annotated[str, typer.Option(help="contiguous, packed (q, k, v of one projection).")] = "contiguous,packed",
    also: Annotated[str, typer.Option(help="Further contenders: FlexAttention, nn.MultiheadAttention.")] = "",
    rounds: Annotated[int, typer.Option(min=2, help="How often each contender takes its turn.")] = 31,
    smoke: Annotated[bool, typer.Option("--smoke", help="Small sizes, one thread; the numbers mean nothing.")] = False,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Count processor time, where others use the machine too; with --threads 1."),
    ] = False,
) -> None:
    """Time attentions against their peers in PyTorch, in turns within one run, and compare with the ceilings.

    The peer is scaled_dot_product_attention; further contenders are quest in three lines, and for an AFT the formula by
    broadcasting. linear is compared with its naive formula.

    Examples:

    [cyan]python -m quest_research.speed speed --out research/results/speed-cpu[/]

    [cyan]python -m quest_research.speed speed --attention quest,aft-simple --also FlexAttention --threads 1[/]
    """
    from . import speed as bench

    try:
        numbers = None if threads is None else [int(number) for number in threads.split(",")]
    except ValueError:
        raise ConfigError(f"--threads is {threads!r}; write numbers, for example 1,2,4") from None
    plan = bench.Plan(
        attentions=tuple(parse_attentions(attention)),
        also=tuple(filter(None, also.split(","))),
        layouts=tuple(layouts.split(",")),
        rounds=rounds,
        device=device,
        dtype=dtype,
        cpu_time=cpu_time,
    )
    command = typed(context)
    if smoke:
        plan, numbers = plan.smoke(), numbers or [1]
    print(bench.run(plan, out, threads=numbers, command=command))


@app.command()
def scaling(
    context: typer.Context,
    attention: Annotated[str | None, typer.Option(help="Comma-separated attentions; without it, a choice.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=expanded, metavar="DIR", help="Write scaling.md, .json and .png into this folder."),
    ] = None,
    longest: Annotated[int, typer.Option(help="The longest sequence, up to 16384 tokens.")] = 16384,
    causal: Annotated[bool, typer.Option("--causal", help="Attend causally.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Up to 512 tokens; the numbers mean nothing.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; without it, one a core.")] = None,
    device: Device = "cpu",
) -> None:
    """Measure how time and memory grow with the length, from 256 to 16384 tokens, with fitted exponents and a plot.

    Example:

    [cyan]python -m quest_research.speed scaling --out research/results/scaling-cpu[/]
    """
    from . import scaling as bench

    chosen = parse_attentions(attention or bench.DEFAULT)
    if smoke:  # tables of positions take a gigabyte at 16384
        longest, threads = min(longest, 512), threads or 1
        chosen = [str(shortened(AttentionConfig.parse(one), 512)) for one in chosen]
    text = bench.run(
        chosen,
        out,
        threads=threads or cores(),
        longest=longest,
        device=device,
        is_causal=causal,
        command=typed(context),
    )
    print(text)


@app.command()
def decode(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions that decode.")] = "quest,standard",
    out: Annotated[
        Path | None,
        typer.Option(parser=expanded, metavar="DIR", help="Write decode.md and decode.json into this folder."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=20, help="Tokens in the cache.")] = 8192,
    rounds: Annotated[int, typer.Option(min=20, help="How many steps are timed.")] = 100,
    smoke: Annotated[bool, typer.Option("--smoke", help="64 tokens; the numbers mean nothing.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; without it, one a core.")] = None,
    device: Device = "cpu",
) -> None:
    """Time one decoding step with a Cache against scaled_dot_product_attention on preallocated keys and values.

    Example:

    [cyan]python -m quest_research.speed decode --attention quest,standard,linear --threads 1[/]
    """
    from . import decode as bench

    if smoke:
        tokens, rounds = 64, 20
    if rounds >= tokens:
        raise ConfigError(f"--rounds is {rounds}; it is smaller than --tokens, {tokens}")
    text = bench.run(
        parse_attentions(attention),
        out,
        threads=threads or cores(),
        tokens=tokens,
        rounds=rounds,
        device=device,
        command=typed(context),
    )
    print(text)


@app.command()
def versions(
    context: typer.Context,
    before: Annotated[str, typer.Option(metavar="PYTHON", help="The interpreter that imports the old quest_core.")],
    out: Annotated[
        Path | None,
        typer.Option(parser=expanded, metavar="DIR", help="Write versions.md and versions.json into this folder."),
    ] = None,
    threads: Annotated[str, typer.Option(metavar="N,...", help="CPU threads.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=2, help="How often each version takes its turn in a cell.")] = 15,
) -> None:
    """Time this quest_core against another one, in turns: calls of every mechanism, decoding, training steps.

    Example:

    [cyan]python -m quest_research.speed versions --before ../old/.venv/bin/python[/]
    """
    from . import versions as bench

    numbers = [int(number) for number in threads.split(",")]
    print(bench.run(before, out, threads=numbers, rounds=rounds, command=typed(context)))


def app_main(argv: list[str]) -> int:
    """Run a microbenchmark. Returns 0, 2 for a wrong command, and 128 plus the signal's number after a signal."""
    return exit_code(app, argv, NAME)


if __name__ == "__main__":
    sys.exit(app_main(sys.argv[1:]))
