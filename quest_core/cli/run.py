"""The `quest run` command; :mod:`quest_core.hosts.launch` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ..hosts.launch import run

DESCRIPTION = """\
Start a training command with QUEST's plugins installed, so that its configs accept `attention`. The command is not
changed: a plugin is installed as soon as its framework is imported, in every Python process that the command starts
(torchrun, shell scripts, data loaders), unless it sets PYTHONPATH or runs Python with -I, -E or -S.
"""

EPILOG = """\
examples:
  quest run -- python main.py --cfg pattern.yaml gt.attention quest
  quest run train.py --epochs 10                      the same as: quest run -- python train.py --epochs 10
  quest run -- torchrun --nproc-per-node 2 main.py    any program; a plain `python` is the one that runs quest
"""


def main(argv: Sequence[str]) -> NoReturn:
    """Run the `quest run` command."""
    parser = argparse.ArgumentParser(
        prog="quest run",
        usage="quest run [--host NAME ...] [--] COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        help="install only this plugin, and fail if it does not work; repeat it for others (default: all that work)",
    )
    options, command = split(argv)
    given = parser.parse_args(options)
    if not command:
        parser.error("nothing to run; write for example: quest run -- python train.py")
    run(command, given.host)


def split(argv: Sequence[str], valued: Sequence[str] = ("--host",)) -> tuple[list[str], list[str]]:
    """Return our own options, and the command: the words after '--', or from the first word that is not an option.

    A word after one of the `valued` options is the option's value.
    """
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--":
            return words[:i], words[i + 1 :]
        value = i > 0 and words[i - 1] in valued
        if word == "-m" or not (value or word.startswith("-")):
            return words[:i], words[i:]
    return words, []
