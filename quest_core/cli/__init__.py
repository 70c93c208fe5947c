"""The `quest` command: what is installed, whether it works, and the commands of other packages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .. import __version__
from ..errors import QuestError, one_of
from . import doctor, mechanisms, start
from .new import EXAMPLES, new

EPILOG = """examples:
  quest list                                  every mechanism, with its formula, options and source
  quest check "quest+gqa(kv_heads=4)"         is this text valid, and what does it mean?
  quest check --mechanism quest               does the mechanism keep what it declares?
  quest doctor                                which plugins work here, and how to fix the others
  quest run -- python train.py ...            a training script as it is, with the plugins installed
  quest watch -- python train.py ...          any training script, with its largest logits and entropies
  quest maps -- python predict.py             pictures of the attention of any script's model
  quest new-mechanism mine                    copy an example: a mechanism with its reference and tests
  quest new-plugin mylab                      copy an example: a plugin for a framework, with its tests
  quest bench ls                              benchmarks (after: pip install quest-bench quest-suites)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 success, 1 a check failed, 2 the arguments are wrong."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)
    except QuestError as error:
        print(f"quest: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader stopped, as in `quest list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        return 1


def _run(arguments: list[str]) -> int:
    others = {point.name: point for point in entry_points(group="quest.commands") if point.name not in COMMANDS}
    command = arguments[0] if arguments else ""
    if command in others:
        return int(others[command].load()(arguments[1:]))
    if command == "bench":
        raise QuestError("`quest bench` is a package of its own; pip install quest-bench quest-suites")
    if command and not command.startswith("-") and command not in COMMANDS:
        raise QuestError(f"no command '{command}'; {one_of(command, [*COMMANDS, *others])}")
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
    test = add("check", "explain an attention, or test a mechanism")
    what = test.add_mutually_exclusive_group(required=True)
    what.add_argument("attention", nargs="?", help="a name, name(key=value) or JSON, as in a framework's config")
    what.add_argument("--mechanism", metavar="ATTENTION", help="test what this mechanism declares")
    examine = add("doctor", "which plugins work here, and how to fix the others")
    examine.add_argument("--timeout", metavar="SECONDS", type=float, default=60, help="per import (default: 60)")
    start.add_parsers(commands)
    for kind in EXAMPLES:
        copied = add(f"new-{kind}", f"copy an example of a {kind}, with tests that pass")
        copied.add_argument("name", metavar="NAME", help="the new distribution is quest-NAME")
        copied.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where it is made (default: here)")
    for name, point in others.items():
        summary = point.dist.metadata["Summary"] if point.dist else point.value
        add(name, f"{summary} (quest {name} --help)".replace("%", "%%"))
    return parser


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": lambda _: mechanisms.show(),
    "check": lambda given: (
        mechanisms.check(given.mechanism) if given.mechanism else mechanisms.explain(given.attention)
    ),
    "doctor": lambda given: doctor.main(given.timeout),
    "run": start.run,
    "watch": start.look,
    "maps": start.look,
    "new-mechanism": lambda given: new("mechanism", given.name, given.out),
    "new-plugin": lambda given: new("plugin", given.name, given.out),
}
