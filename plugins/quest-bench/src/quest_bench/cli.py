"""`quest bench`: ls, run, status, report, merge and compare."""

import os
import shlex
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quest_core.errors import ConfigError, QuestError
from quest_suites.contract import Cell

from . import store
from .plan import (
    Plan,
    catalogue,
    check_data,
    check_heads,
    parse_attentions,
    parse_seeds,
    parse_settings,
    portable,
    select,
    suite_of,
    write_seeds,
    write_value,
)
from .run import Outcome, Runner, signal_of, signals
from .worker import cores, describe_os_error, machine, utc

app = typer.Typer(
    name="quest bench",
    help="Run benchmark suites over attentions and seeds, and report them with intervals.\n\n"
    "Start with [bold]quest bench ls[/], then for example\n\n"
    "[cyan]quest bench run transformers/bytes-lm --attention standard,quest --seeds 0-4 --out runs/bytes[/]\n\n"
    "[cyan]quest bench report runs/bytes[/]",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)


def app_main(argv: list[str]) -> int:
    """Run `quest bench ARGV`.

    Returns:
        0, 1 if cells failed, 2 for a wrong command, and 128 plus the signal's number after SIGINT or SIGTERM.
    """
    return exit_code(app, argv, "quest bench")


def exit_code(application: typer.Typer, argv: list[str], name: str) -> int:
    """Run a typer application and return its exit code; an error of ours is one red line and 2."""
    try:
        application(argv, prog_name=name, obj=argv)  # `run` records what was typed
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except QuestError as error:
        return _complain(str(error))
    except OSError as error:  # a full disk, a read-only folder
        return _complain(describe_os_error(error))
    return 0


def _complain(text: str) -> int:
    Console(stderr=True, highlight=False).print(Text(f"error: {text}", style="red"), soft_wrap=True)
    return 2


Python = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        metavar="PLUGIN=PATH",
        help="The python of a plugin's own environment; repeatable. QUEST_PYTHON_<PLUGIN> does the same.",
    ),
]


def expand_home(text: str | Path) -> Path:
    """A folder of the command line. A recorded command quotes its ~, which a shell then leaves as it is."""
    return Path(os.path.expanduser(text))


RunFolder = Annotated[
    Path, typer.Argument(parser=expand_home, metavar="DIR", help="The folder of `quest bench run --out`.")
]


@app.command()
def ls(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="A suite, or the first words of several.")] = "",
    python: Python = None,
) -> None:
    """List suites and the state of their plugins; of those that are named, their tasks, options and data.

    Example:

    [cyan]quest bench ls ts/uea[/]
    """
    available = catalogue(python or [])
    shown = {name: one for name, one in available.suites.items() if name.startswith(suite)}
    if suite and not shown:
        shown = {(one := suite_of(available, suite)).name: one}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("suite", "metric", "data", "plugin"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "suite")  # names are there to be copied
    for one in shown.values():
        record = one.record
        table.add_row(
            Text(one.name, style="cyan"),
            one.measured,
            "needed" if one.data_required else "optional" if one.data else "included",
            Text(f"{record.name}: {record.status}", style="green" if record.status == "ok" else "red"),
        )
    console.print(table if shown else "no suite is installed; fix: pip install quest-suites")
    if not suite and shown:
        console.print("\ntasks and options of a suite: quest bench ls SUITE")
    for one in shown.values() if suite else ():
        console.print(f"\n[cyan]{one.name}[/]  {one.summary}")
        console.print(Text(f"tasks: {', '.join(one.tasks)}"))
        if one.data:
            console.print(Text(f"--data: {one.data}"))
        grid = Table.grid(padding=(0, 2))
        for option in one.options.values():
            choices = f" (one of {', '.join(map(str, option['choices']))})" if option.get("choices") else ""
            key = Text(f"  --set {option['name']}={write_value(option['default'])}", no_wrap=True)
            grid.add_row(key, Text(f"{option['doc']}{choices}", style="dim"))
        console.print(grid)
    needed = {one.record.name for one in shown.values()}
    wrong = [one for one in available.records.values() if one.status != "ok" and (not suite or one.name in needed)]
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
    out: Annotated[
        Path | None, typer.Option(parser=expand_home, metavar="DIR", help="The run's folder; without it, runs/SUITE.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Seconds instead of hours; the numbers mean nothing.")] = False,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Your own data in its official layout.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the suite; KEY=A,B sweeps it. Repeatable."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cells at a time; without it, cores / threads, or 1 for times."),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each cell. One is fastest for small models: they run side by side.")
    ] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which a cell is ended and counts as failed.")
    ] = None,
    python: Python = None,
) -> None:
    """Run a grid: tasks × attentions × seeds × option values. The same command again resumes.

    Examples:

    [cyan]quest bench run transformers/bytes-lm --attention standard,quest --seeds 0-4 --out runs/bytes[/]

    [cyan]quest bench run transformers/bytes-lm --attention quest --set lr=0.001,0.003[/]   sweeps an option

    [cyan]quest bench run ts/uea --data UEA[/]   every dataset in the folder UEA

    [cyan]quest bench run ts/uea --python tsai=~/envs/tsai/bin/python[/]   cells run in the plugin's environment

    [cyan]quest bench run graphgps/configs/GPS/zinc-GPS+RWSE.yaml --data GraphGPS[/]   in a checkout's own trainer

    Finished cells are kept and skipped, failed ones are tried again; a stopped run leaves no half results. Several
    orchestrators, also on several machines, may run into one folder at a time; each cell runs once.
    """
    problems: list[str] = []
    checked: dict[str, Any] = {}
    available = catalogue(python or [])

    def check(name: str, read: Any) -> None:
        try:
            checked[name] = read()
        except ConfigError as error:  # all problems are listed at once
            problems.append(str(error))

    check("attentions", lambda: parse_attentions(attention))
    check("seeds", lambda: parse_seeds(seeds))
    check("suite", lambda: suite_of(available, suite))
    if "suite" in checked:
        check("settings", lambda: parse_settings(checked["suite"], settings or []))
        check("data", lambda: check_data(checked["suite"], data))
    if {"attentions", "settings"} <= checked.keys():
        check("heads", lambda: check_heads(checked["suite"], checked["attentions"], checked["settings"]))
    if "data" in checked:
        with console.status("reading --data, whose fingerprint is kept for the next start") if data else nullcontext():
            check("tasks", lambda: select(available, suite, checked["data"]))
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    chosen, tasks = checked["tasks"]
    plan = Plan(chosen, tasks, checked["attentions"], checked["seeds"], checked["settings"], smoke, checked["data"])
    folder = out or Path("runs", *chosen.name.split("/"))
    runner = Runner(
        chosen,
        available.python(chosen),
        console,
        jobs=jobs or chosen.info.get("jobs") or max(1, cores() // threads),
        threads=threads,
        timeout=timeout,
    )
    outcome = execute(plan, folder, runner, ["quest", "bench", *context.obj])
    if outcome.stopped:
        raise typer.Exit(128 + outcome.stopped)
    if outcome.failed:
        raise typer.Exit(1)


def execute(plan: Plan, folder: Path, runner: Runner, command: Sequence[str]) -> Outcome:
    """Run a plan into a folder, record it in run.json and print how it went; a signal ends it in order.

    Args:
        command: the words that were typed. They are printed as they are, and recorded without the home folder.
    """
    with signals():
        try:
            outcome = _execute(plan, folder, runner, command)
        except KeyboardInterrupt as stop:  # before the cells, or a second signal
            outcome = Outcome(stopped=signal_of(stop))
    if outcome.stopped:
        count = len(outcome.done)
        done = f"stopped by {outcome.stopped.name}; {count} cell{'s' * (count != 1)} finished in this run"
        console.print(f"{done}. The same command resumes:\n  {shlex.join(command)}", markup=False, soft_wrap=True)
    else:
        console.print(f"next: quest bench report {shlex.quote(str(folder))}", markup=False)
    return outcome


def _execute(plan: Plan, folder: Path, runner: Runner, command: Sequence[str]) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    cells = plan.cells(folder)
    store.check_conflicts(folder, plan)
    states = Counter(store.state(cell) for cell in cells)
    _show_grid(plan, cells, states)
    record = _record(plan, runner, command)
    idle = states["done"] == len(cells)
    if not idle:  # before the cells: a run that is killed has its record, and what it would have run
        store.write_run(folder, record)
    for cell in cells:
        if store.state(cell) != "done":
            store.prepare(cell, plan.suite.metric)
    started = time.monotonic()
    outcome = runner.run(cells)
    if not idle:
        record |= {"seconds": time.monotonic() - started, "interrupted": outcome.stopped is not None}
        store.write_run(folder, record)
    if outcome.elsewhere:
        console.print(f"{len(outcome.elsewhere)} cells are left to another command, which runs them now")
    show_causes([store.load(cell.workdir.parent) for cell in outcome.failed])
    return outcome


def _show_grid(plan: Plan, cells: Sequence[Cell], states: Counter[str]) -> None:
    """Print how many cells a run has, by what they differ in, and how they ended earlier."""
    sizes = {"tasks": len(plan.tasks), "attentions": len(plan.attentions), "seeds": len(plan.seeds)}
    sizes |= {f"values of {key}": len(values) for key, values in plan.settings.items() if len(values) > 1}
    grid = " × ".join(f"{size} {name if size > 1 else name[:-1]}" for name, size in sizes.items())
    console.print(f"[bold]{plan.suite.name}[/]  {len(cells)} cell{'s' * (len(cells) != 1)}: {grid}")
    if states["done"]:
        console.print(f"{states['done']} finished earlier and are kept, {len(cells) - states['done']} to run")
    if states["failed"]:
        console.print(f"{states['failed']} failed earlier and are tried again")


def _record(plan: Plan, runner: Runner, command: Sequence[str]) -> dict[str, Any]:
    """What run.json holds of a command that has not ended."""
    return {
        "id": uuid.uuid4().hex,
        "command": portable(command),
        "started": utc(),
        "suite": plan.suite.name,
        "tasks": list(plan.tasks),
        "data": dict(plan.tasks),
        "attentions": list(plan.attentions),
        "seeds": write_seeds(plan.seeds),
        "settings": {key: list(values) for key, values in plan.settings.items()},
        "smoke": plan.smoke,
        "jobs": runner.jobs,
        "threads": runner.threads,
        "machine": machine(),
        "git": store.commit(),
        "suite_info": plan.suite.info,
        "seconds": None,
        "interrupted": True,
    }


def show_causes(cells: Sequence[store.Stored]) -> None:
    """Print why cells failed: each cause once, with its first log."""
    for cause, failed in store.causes(cells):
        text = f"{len(failed)} failed: {cause}  (first: {failed[0].folder / 'log.txt'})"
        console.print(Text(text, style="red"), soft_wrap=True)


@app.command()
def report(
    folder: RunFolder,
    baseline: Annotated[str, typer.Option(help="The attention that differences are taken against.")] = "standard",
) -> None:
    """Write DIR/report.html, DIR/report.md and DIR/results.parquet.

    Example:

    [cyan]quest bench report runs/toy[/]
    """
    from .report import write_report  # matplotlib and pandas take a second that ls and run need not wait for

    console.print(f"wrote {write_report(folder, baseline)}", markup=False, soft_wrap=True)


@app.command()
def status(folder: RunFolder) -> None:
    """Show which cells are done, running, failed or waiting, also while orchestrators work.

    Example:

    [cyan]quest bench status runs/toy[/]
    """
    cells = store.load_all(folder)
    if not cells:
        raise ConfigError(f"{folder} holds no cells; first run: quest bench run SUITE --out {shlex.quote(str(folder))}")
    running = {cell.folder: who for cell in cells if (who := store.holder(cell.folder))}
    counts = Counter("running" if cell.folder in running else cell.state for cell in cells)
    console.print(", ".join(f"{counts[word]} {word}" for word in ("done", "running", "failed", "unfinished")))
    for folder, who in running.items():
        log = folder / "progress.log"
        last = log.read_text(encoding="utf-8").splitlines()[-1:] if log.is_file() else []
        console.print(f"running {folder.name}  {''.join(last) or 'starting'}  ({who})", markup=False, soft_wrap=True)
    show_causes(cells)


@app.command()
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(parser=expand_home, metavar="DIR...", help="Run folders, for example of two machines."),
    ],
    out: Annotated[Path, typer.Option(parser=expand_home, metavar="DIR", help="The folder that gets all their cells.")],
) -> None:
    """Put the cells of several run folders into one.

    Example:

    [cyan]quest bench merge runs/laptop runs/server --out runs/both[/]
    """
    copied, kept = store.merge(folders, out)
    follow_up = shlex.join(["quest", "bench", "report", str(out)])
    console.print(f"{out}: {copied} cells copied, {kept} were there; next: {follow_up}", markup=False)


@app.command()
def compare(
    first: Annotated[
        Path, typer.Argument(parser=expand_home, metavar="A", help="The run folder that is compared with.")
    ],
    second: Annotated[Path, typer.Argument(parser=expand_home, metavar="B", help="The run folder in question.")],
) -> None:
    """Compare two runs of one grid cell by cell, for example before and after a change.

    Each attention in B is compared with itself in A, paired by seed, with Holm's correction over all rows.

    Example:

    [cyan]quest bench compare runs/before runs/after[/]
    """
    from .compare import compare_runs

    console.print(compare_runs(first, second))


if __name__ == "__main__":
    sys.exit(app_main(sys.argv[1:]))
