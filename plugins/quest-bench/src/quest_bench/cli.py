"""`quest bench`: ls, run, report, speed, scaling and decode."""

from __future__ import annotations

import datetime
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quest_core.errors import ConfigError, QuestError

from . import store
from .plan import (
    Plan,
    catalogue,
    check_data,
    hide_home,
    parse_attentions,
    parse_seeds,
    parse_settings,
    select,
    write_seeds,
    write_value,
)
from .run import Outcome, label, run_cells

app = typer.Typer(
    name="quest bench",
    help="Run benchmark suites over attentions and seeds, and report them with intervals.\n\n"
    "Start with [bold]quest bench ls[/], then for example\n\n"
    "[cyan]quest bench run toy/spurious --attention standard,quest --seeds 0-4 --out runs/toy[/]\n\n"
    "[cyan]quest bench report runs/toy[/]",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)


def app_main(argv: list[str]) -> int:
    """Run `quest bench ARGV`. Returns 0, 1 when cells failed, 2 for a wrong command, 130 when interrupted."""
    return exit_code(app, argv, "quest bench")


def exit_code(application: typer.Typer, argv: list[str], name: str) -> int:
    """Run a typer application and return its exit code; an error of ours is one red line and 2."""
    try:
        application(argv, prog_name=name, obj=argv)  # `run` records what was typed
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except QuestError as error:
        Console(stderr=True, highlight=False).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return 2
    return 0


Python = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        metavar="PLUGIN=PATH",
        help="The python of a plugin's own environment; repeatable. QUEST_PYTHON_<PLUGIN> does the same.",
    ),
]


@app.command()
def ls(python: Python = None) -> None:
    """List suites with their tasks, options, data and the state of their plugin."""
    available = catalogue(python or [])
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("suite", "tasks", "metric", "data", "plugin"):
        table.add_column(heading, overflow="fold")
    for suite in available.suites.values():
        host = available.records.get(suite.needs)
        state = f"{suite.needs}: not installed" if host is None else f"{host.name}: {host.status}"
        good = host is not None and host.status == "ok" and suite.record.status == "ok"
        data = "needs --data" if suite.data_required else "--data optional" if suite.data else "brought along"
        table.add_row(
            Text(suite.name, style="cyan"),
            ", ".join(suite.tasks),
            f"{suite.metric} {suite.unit}".strip(),
            data,
            Text(state, style="green" if good else "red"),
        )
    console.print(table if available.suites else "no plugin brings a suite; pip install quest-tsai, for example")
    for suite in available.suites.values():
        console.print(f"\n[cyan]{suite.name}[/]  {suite.summary}")
        if suite.data:
            console.print(Text(f"data: {suite.data}"))
        grid = Table.grid(padding=(0, 2))
        for option in suite.options.values():
            choices = f" (one of {', '.join(map(str, option['choices']))})" if option.get("choices") else ""
            key = Text(f"  --set {option['name']}={write_value(option['default'])}", no_wrap=True)
            grid.add_row(key, Text(f"{option['doc']}{choices}", style="dim"))
        console.print(grid)
    wrong = [record for record in available.records.values() if record.status != "ok"]
    if wrong:
        console.print()
    for record in wrong:
        words = f"plugin '{record.name}' is {record.status}: {record.detail}; fix: {record.fix}"
        console.print(Text(words, style="red"), soft_wrap=True)


@app.command()
def run(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(metavar="SUITE[/TASK,...]", help="A suite, or some of its tasks.")],
    attention: Annotated[
        str,
        typer.Option(help='Comma-separated attentions, for example standard,quest,"quest+gqa(kv_heads=4)".'),
    ] = "standard,quest",
    seeds: Annotated[str, typer.Option(help="Seeds: 0-4 or 0,3,7.")] = "0-4",
    out: Annotated[Path | None, typer.Option(help="The run's folder; without it, runs/SUITE.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Seconds instead of hours; the numbers mean nothing.")] = False,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Your own data in its official layout.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the suite; KEY=A,B sweeps it. Repeatable."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time; without it, cores / threads.")] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each cell. One is fastest for small models: they run side by side.")
    ] = 1,
    python: Python = None,
) -> None:
    """Run a grid: tasks × attentions × seeds × option values. The same command again resumes.

    Examples:

    [cyan]quest bench run toy/spurious --attention standard,quest --seeds 0-4 --out runs/toy[/]

    [cyan]quest bench run toy/spurious --attention quest --set samples=512,2048[/]   sweeps an option

    [cyan]quest bench run ts/uea/JapaneseVowels --attention "standard,quest+gqa(kv_heads=4)"[/]   one task

    [cyan]quest bench run ts/uea --python tsai=~/envs/tsai/bin/python[/]   cells run in the plugin's environment

    Finished cells are kept and skipped, failed ones are tried again; a stopped run leaves no half results.
    """
    problems: list[str] = []
    checked: dict[str, Any] = {}
    available = catalogue(python or [])

    def check(name: str, read: Any) -> None:
        try:
            checked[name] = read()
        except ConfigError as error:  # all that is wrong is told at once
            problems.append(str(error))

    check("suite", lambda: select(available, suite, data))
    check("attentions", lambda: parse_attentions(attention))
    check("seeds", lambda: parse_seeds(seeds))
    if "suite" in checked:
        check("settings", lambda: parse_settings(checked["suite"][0], settings or []))
        check("data", lambda: check_data(checked["suite"][0], data))
    if problems:
        raise ConfigError("; ".join(problems))
    chosen, tasks = checked["suite"]
    plan = Plan(chosen, tasks, checked["attentions"], checked["seeds"], checked["settings"], smoke, checked["data"])
    folder = out or Path("runs", *chosen.name.split("/"))
    command = shlex.join(["quest", "bench", *map(portable, context.obj)])
    outcome = execute(plan, folder, available.python(chosen), jobs, threads, command)
    if outcome.interrupted:
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)


def execute(plan: Plan, folder: Path, python: str, jobs: int | None, threads: int, command: str) -> Outcome:
    """Run a plan into a folder, record it in run.json and say how it went."""
    store.check_conflicts(folder, plan)
    cells = plan.cells(folder)
    jobs = jobs or max(1, store.cores() // threads)
    with store.locked(folder):
        states = Counter(store.state(cell) for cell in cells)
        sizes = {"tasks": len(plan.tasks), "attentions": len(plan.attentions), "seeds": len(plan.seeds)}
        sizes |= {f"values of {key}": len(values) for key, values in plan.settings.items() if len(values) > 1}
        grid = " × ".join(f"{size} {name if size > 1 else name[:-1]}" for name, size in sizes.items())
        console.print(f"[bold]{plan.suite.name}[/]  {len(cells)} cells: {grid}")
        if states["done"]:
            console.print(f"{states['done']} finished earlier and are kept, {len(cells) - states['done']} to run")
        if states["failed"]:
            console.print(f"{states['failed']} failed earlier and are tried again")
        record: dict[str, Any] = {
            "command": command,
            "started": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "suite": plan.suite.name,
            "tasks": list(plan.tasks),
            "attentions": list(plan.attentions),
            "seeds": write_seeds(plan.seeds),
            "settings": {key: list(values) for key, values in plan.settings.items()},
            "smoke": plan.smoke,
            "jobs": jobs,
            "threads": threads,
            "versions": store.versions(plan),
            "machine": store.machine(),
            "git": store.git_commit(),
        }
        record |= {"suite_info": plan.suite.info, "seconds": None, "interrupted": True}
        earlier = store.read_run(folder)
        idle = states["done"] == len(cells)
        if not idle:  # before the cells: a run that is killed has its record too
            store.write_run(folder, earlier, record)
        started = time.monotonic()
        outcome = run_cells(cells, plan.suite, python, jobs, threads, console)
        if not idle:
            record |= {"seconds": time.monotonic() - started, "interrupted": outcome.interrupted}
            store.write_run(folder, earlier, record)
    if outcome.failed:
        table = Table(title="failed cells", title_justify="left", header_style="bold", title_style="bold red")
        for heading in ("cell", "reason", "last line of the log", "log"):
            table.add_column(heading, overflow="fold")
        for cell, reason in outcome.failed:
            log = cell.workdir.parent / "log.txt"
            table.add_row(*map(Text, (label(cell), reason, store.last_line(log.parent, reason), str(log))))
        console.print(table)
    if outcome.interrupted:
        done = f"interrupted; {len(outcome.done)} cells finished in this run"
        console.print(f"{done}. The same command resumes:\n  {command}", markup=False, soft_wrap=True)
    else:
        console.print(f"next: quest bench report {folder}", markup=False)
    return outcome


def portable(word: str) -> str:
    """A word of the command without the user's home folder in it."""
    head, equals, tail = word.partition("=")
    return f"{head}={hide_home(tail)}" if equals else hide_home(word)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of `quest bench run --out`.")],
    baseline: Annotated[str, typer.Option(help="The attention that differences are taken against.")] = "standard",
) -> None:
    """Write DIR/report.html, DIR/report.md and DIR/results.parquet.

    Example:

    [cyan]quest bench report runs/toy[/]
    """
    from .report import write_report  # matplotlib and pandas take a second that ls and run need not wait for

    console.print(f"wrote {write_report(folder, baseline)}", markup=False, soft_wrap=True)


@app.command()
def speed(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions without groupings.")] = "quest,standard",
    out: Annotated[Path | None, typer.Option(help="Write report.md and speed.json into this folder.")] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="CPU threads; without it, 1,2,4 up to the number of cores.")
    ] = None,
    layouts: Annotated[str, typer.Option(help="contiguous, packed (q, k, v of one projection).")] = "contiguous,packed",
    also: Annotated[str, typer.Option(help="Further contenders: FlexAttention, nn.MultiheadAttention.")] = "",
    rounds: Annotated[int, typer.Option(min=2, help="How often each contender takes its turn.")] = 31,
    smoke: Annotated[bool, typer.Option("--smoke", help="Small sizes, one thread; the numbers mean nothing.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Count processor time, where others use the machine too; with --threads 1."),
    ] = False,
) -> None:
    """Time attentions against their peers in PyTorch, in turns within one run, and compare with the ceilings.

    The peer is scaled_dot_product_attention; beside it runs quest in three lines, and for an AFT the formula by
    broadcasting. linear runs beside its naive formula.

    Examples:

    [cyan]quest bench speed --out docs/results/speed-cpu[/]

    [cyan]quest bench speed --attention quest,qknorm-hs,aft-simple --also FlexAttention --threads 1[/]
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
    command = shlex.join(["quest", "bench", *map(portable, context.obj)])
    if smoke:
        plan, numbers = plan.smoke(), numbers or [1]
    print(bench.run(plan, out, threads=numbers, command=command))


@app.command()
def scaling(
    context: typer.Context,
    attention: Annotated[str | None, typer.Option(help="Comma-separated attentions; without it, a choice.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write scaling.md, .json and .png into this folder.")] = None,
    longest: Annotated[int, typer.Option(help="The longest sequence, up to 16384 tokens.")] = 16384,
    causal: Annotated[bool, typer.Option("--causal", help="Attend causally.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; without it, one a core.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Measure how time and memory grow with the length, from 256 to 16384 tokens, with fitted exponents and a plot.

    Example:

    [cyan]quest bench scaling --out docs/results/scaling-cpu[/]
    """
    from . import scaling as bench

    text = bench.run(
        parse_attentions(attention or bench.DEFAULT),
        out,
        threads=threads or store.cores(),
        longest=longest,
        device=device,
        is_causal=causal,
        command=shlex.join(["quest", "bench", *map(portable, context.obj)]),
    )
    print(text)


@app.command()
def decode(
    context: typer.Context,
    attention: Annotated[str, typer.Option(help="Comma-separated attentions that decode.")] = "quest,standard",
    out: Annotated[Path | None, typer.Option(help="Write decode.md and decode.json into this folder.")] = None,
    tokens: Annotated[int, typer.Option(min=20, help="Tokens in the cache.")] = 8192,
    rounds: Annotated[int, typer.Option(min=20, help="How many steps are timed.")] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; without it, one a core.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Time one decoding step with a Cache against scaled_dot_product_attention on preallocated keys and values.

    Example:

    [cyan]quest bench decode --attention quest,standard,linear --threads 1[/]
    """
    from . import decode as bench

    if rounds >= tokens:
        raise ConfigError(f"--rounds is {rounds}; it is smaller than --tokens, {tokens}")
    text = bench.run(
        parse_attentions(attention),
        out,
        threads=threads or store.cores(),
        tokens=tokens,
        rounds=rounds,
        device=device,
        command=shlex.join(["quest", "bench", *map(portable, context.obj)]),
    )
    print(text)


if __name__ == "__main__":
    sys.exit(app_main(sys.argv[1:]))
