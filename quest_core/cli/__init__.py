"""The `quest` command: what is installed, whether it works, and the commands of other packages."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
    points = {point.name: point for point in entry_points(group="quest.commands")}
    parser, own = parsers(points)
    command = arguments[0] if arguments else ""
    if command in points and command not in own:
        return int(points[command].load()(arguments[1:]))
    if command == "bench":
        raise QuestError("`quest bench` is a package of its own; pip install quest-bench quest-suites")
    if command and not command.startswith("-") and command not in own:
        raise QuestError(f"no command '{command}'; {one_of(command, [*own, *points])}")
    chosen, unknown = parser.parse_known_args(arguments or ["--help"])
    if unknown:
        own[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    action: Callable[[argparse.Namespace], int] = chosen.action
    return action(chosen)


def parsers(points: Mapping[str, EntryPoint]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of `quest`, whose help lists commands of other packages too, and those of our own by name."""
    parser = argparse.ArgumentParser(
        prog="quest",
        description="QUEST attention and its relatives, in the frameworks you already train with.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quest-core {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, words: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.set_defaults(action=action)
        return one

    add("list", "every mechanism, with its formula, options and source", lambda _: mechanisms.show())
    test = add(
        "check",
        "explain an attention, or test a mechanism",
        lambda given: (
            mechanisms.explain(given.attention) if given.mechanism is None else mechanisms.check(given.mechanism)
        ),
    )
    what = test.add_mutually_exclusive_group(required=True)
    what.add_argument("attention", nargs="?", help="a name, name(key=value) or JSON, as in a framework's config")
    what.add_argument("--mechanism", metavar="ATTENTION", help="test what this mechanism declares")
    examine = add(
        "doctor", "which plugins work here, and how to fix the others", lambda given: doctor.main(given.timeout)
    )
    examine.add_argument("--timeout", metavar="SECONDS", type=int, default=60, help="per import (default: 60)")
    start.add_parsers(commands)
    for kind in EXAMPLES:
        copied = add(
            f"new-{kind}",
            f"copy an example of a {kind}, with tests that pass",
            lambda given: new(given.kind, given.name, given.out),
        )
        copied.add_argument("name", metavar="NAME", help="the new distribution is quest-NAME")
        copied.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where it is made (default: here)")
        copied.set_defaults(kind=kind)
    own = dict(commands.choices)
    for name, point in points.items():
        if name not in own:
            summary = point.dist.metadata["Summary"] if point.dist else point.value
            words = f"{summary} (quest {name} --help)".replace("%", "%%")
            commands.add_parser(name, help=words)
    return parser, own
