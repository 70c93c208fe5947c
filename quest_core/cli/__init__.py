"""The `quest` command: what is installed, whether it works, and the commands of other packages."""

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
from ..errors import PluginError, QuestError
from . import doctor, run
from .mechanisms import check, explain, show
from .new import copy_example

EPILOG = """examples:
  quest list                                  every mechanism, with its formula, options and source
  quest check "quest+gqa(kv_heads=4)"         is this text valid, and what does it mean?
  quest check --mechanism quest               does the mechanism keep what it declares?
  quest doctor                                which plugins work here, and how to fix the others
  quest run -- python train.py ...            a training script as it is, with the plugins installed
  quest new-mechanism mine                    copy an example: a mechanism with its reference and tests
  quest bench run toy/spurious --attention standard,quest     (after: pip install quest-bench)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 success, 1 a check failed, 2 the arguments are wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # formulas on a terminal without Unicode
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
    except BrokenPipeError:  # the reader stopped, as in `quest list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        return 1


def _run(arguments: list[str]) -> int:
    others = {point.name: point for point in entry_points(group="quest.commands") if point.name not in COMMANDS}
    command = arguments[0] if arguments else ""
    if command == "run":  # the words after our options belong to the user's command
        return run.main(arguments[1:])
    if command in others:
        return _load(others[command])(arguments[1:])
    chosen = _parser(others).parse_args(arguments)
    return COMMANDS[chosen.command](chosen)


def _parser(others: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    """Return the parser of our own commands, whose help lists the commands of other packages too."""
    parser = argparse.ArgumentParser(
        prog="quest",
        description="QUEST attention and its relatives, in the frameworks you already train with.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quest-core {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, words: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=words, description=words, allow_abbrev=False)

    add("list", "every mechanism, with its formula, options and source")
    test = add("check", "explain an attention, or run the suite of a mechanism or a plugin")
    what = test.add_mutually_exclusive_group(required=True)
    what.add_argument("attention", nargs="?", help="a name, name(key=value) or JSON, as in a framework's config")
    what.add_argument("--mechanism", metavar="ATTENTION", help="test what this mechanism declares")
    what.add_argument("--plugin", metavar="NAME", help="run the conformance tests of a plugin, or of a folder of tests")
    examine = add("doctor", "which plugins work here, and how to fix the others")
    examine.add_argument("--timeout", metavar="SECONDS", type=float, default=60, help="per import (default: 60)")
    add("run", "start a training command with the plugins installed (quest run --help)")
    new = add("new-mechanism", "copy an example: a mechanism with a reference and tests that pass")
    new.add_argument("name", metavar="NAME", help="what users will write, as in attention=NAME")
    new.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where the folder is made (default: here)")
    for name, point in others.items():
        summary = point.dist.metadata["Summary"] if point.dist else point.value
        add(name, f"{summary} (quest {name} --help)".replace("%", "%%"))
    return parser


def _load(point: EntryPoint) -> Callable[[list[str]], int]:
    try:
        command: Callable[[list[str]], int] = point.load()
    except Exception as error:
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        raise PluginError(f"the command '{point.name}' of {owner} cannot be imported: {error!r}") from error
    return command


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


def _new_mechanism(arguments: argparse.Namespace) -> int:
    folder = copy_example("third_party_mechanism", "power", arguments.name, arguments.out)
    print(f"wrote {folder}; next:")
    print(f"  pip install -e {shlex.quote(f'{folder}[test]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print("  quest list      # it is there")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": lambda _: show(),
    "check": _check,
    "doctor": lambda arguments: doctor.main(arguments.timeout),
    "run": lambda _: 0,  # not reached: `_run` passes its arguments to `quest run` unparsed
    "new-mechanism": _new_mechanism,
}
