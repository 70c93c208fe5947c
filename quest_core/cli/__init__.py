"""The `quest` command: what exists here, whether it works, and the commands that plugins add."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .. import __version__
from ..errors import PluginError, QuestError, one_of
from ..mechanisms.part import AXES
from . import run
from .doctor import doctor
from .mechanisms import check, explain, show
from .options import refuse_misspelt, seconds
from .template import new_mechanism

EPILOG = """examples:
  quest list                                  every mechanism, with its formula, options and source
  quest check "quest+gqa(kv_heads=4)"         is this text valid, and what does it mean?
  quest check --mechanism quest               does the mechanism keep what it declares?
  quest doctor                                which packages work here, and how to mend the others
  quest run -- python train.py ...            a training script as it is, with the plugins installed
  quest new-mechanism power --axis score      a mechanism of your own, with its reference and tests
  quest bench run toy/spurious --attention standard,quest     (with quest-bench installed)
"""

ELSEWHERE = {"bench": "quest-bench"}
"""Commands of distributions that may not be installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 well, 1 something is not, 2 a mistake in the arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # formulas and names of other packages on a terminal without Unicode
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            print(end="", flush=True)
    except QuestError as error:
        print(f"quest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quest: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `quest list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 1


def _run(arguments: list[str]) -> int:
    parser, commands, plugins = _parser()
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] == "run":
            return run.main(arguments[1:])
        if arguments[0] in plugins:
            return _load(plugins[arguments[0]])(arguments[1:])
        if arguments[0] not in COMMANDS:
            raise QuestError(_unknown(arguments[0], plugins))
        refuse_misspelt(commands[arguments[0]], arguments[1:])
    refuse_misspelt(parser, arguments[:1])
    chosen = parser.parse_args(arguments)
    return COMMANDS[chosen.command](chosen)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser], dict[str, EntryPoint]]:
    """Return the parser, those of its commands, and the commands of plugins.

    A plugin cannot take the name of a command of ours or of another.
    """
    parser = argparse.ArgumentParser(
        prog="quest",
        description="QUEST attention and its relatives, in the frameworks you already train with.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quest-core {__version__}")
    choose = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    choose.add_parser("list", help="every mechanism, with its formula, options and source")
    test = choose.add_parser("check", help="explain an attention, or run the suite of a mechanism or a plugin")
    what = test.add_mutually_exclusive_group(required=True)
    what.add_argument("attention", nargs="?", help="a name, name(key=value) or JSON, as in a framework's config")
    what.add_argument("--mechanism", metavar="ATTENTION", help="test what this mechanism declares")
    what.add_argument("--plugin", metavar="NAME", help="run the conformance tests of a plugin, or of a folder of tests")
    mend = choose.add_parser("doctor", help="which packages work here, and how to mend the others")
    mend.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=60, help="for one import (default: %(default)g)"
    )
    choose.add_parser("run", help="start a training command with the plugins installed (quest run --help)")
    own = choose.add_parser("new-mechanism", help="write a mechanism of your own, with a reference and tests that pass")
    own.add_argument("name", metavar="NAME", help="what users will write, as in attention=NAME")
    own.add_argument("--axis", metavar="AXIS", default="score", help=f"{', '.join(AXES)} (default: %(default)s)")
    own.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where the folder is made (default: here)")
    plugins: dict[str, EntryPoint] = {}
    for entry in entry_points(group="quest.commands"):
        if entry.name not in (*COMMANDS, *plugins):
            plugins[entry.name] = entry
            summary = entry.dist.metadata["Summary"] if entry.dist else ""
            words = f"{summary} (quest {entry.name} --help)".replace("%", "%%")
            choose.add_parser(entry.name, help=words, add_help=False)
    return parser, choose.choices, plugins


def _unknown(command: str, plugins: dict[str, EntryPoint]) -> str:
    said = f"no command '{command}'; {one_of(command, {*COMMANDS, *plugins, *ELSEWHERE})}"
    if command in ELSEWHERE:
        said = f"no command '{command}' is installed"
    for name, owner in ELSEWHERE.items():
        if name not in plugins and f"'{name}'" in said:
            said += f"; {name} comes with {owner}: pip install {owner}"
    return said


def _load(entry: EntryPoint) -> Callable[[list[str]], int]:
    try:
        command: Callable[[list[str]], int] = entry.load()
    except Exception as error:
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        raise PluginError(f"the command '{entry.name}' of {owner} cannot be imported: {error!r}") from error
    return command


def _list(_: argparse.Namespace) -> int:
    return show()


def _check(arguments: argparse.Namespace) -> int:
    if arguments.attention is not None:
        return explain(arguments.attention)
    if arguments.mechanism is not None:
        return check(arguments.mechanism)
    try:
        from ..testing.run import check_plugin
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise PluginError("the conformance suite runs in pytest; fix: pip install 'quest-core[test]'") from error
    return check_plugin(arguments.plugin)


def _doctor(arguments: argparse.Namespace) -> int:
    return doctor(arguments.timeout)


def _new_mechanism(arguments: argparse.Namespace) -> int:
    folder = new_mechanism(arguments.name, axis=arguments.axis, out=arguments.out)
    print(f"wrote {folder}; next:")
    print(f"  pip install -e {shlex.quote(f'{folder}[test]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print("  quest list      # it is there")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "check": _check,
    "doctor": _doctor,
    "run": _list,  # not reached: `main` hands its arguments to `quest run` unparsed
    "new-mechanism": _new_mechanism,
}
