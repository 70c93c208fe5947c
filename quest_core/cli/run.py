"""The `quest run` command; :mod:`quest_core.hosts.launch` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..hosts.launch import run

DESCRIPTION = """\
Start a training command with QUEST's plugins installed, so that its configs understand `attention`,
without a line changed in it:

  quest run -- python main.py --cfg pattern.yaml gt.attention quest

In the command, and in every Python process that it starts (torchrun, shell scripts, data loaders), a plugin is
installed at the moment its framework is imported. A plain `python` is the one that runs quest.
"""

EPILOG = """\
examples:
  quest run train.py --epochs 10                      a script; the same as: quest run -- python train.py --epochs 10
  quest run --host graphgps -- python -m torch.distributed.run --nproc-per-node 2 main.py --cfg pattern.yaml
  quest run -- torchrun --nproc-per-node 2 main.py    any program
  quest run -- bash scripts/train.sh                  unless the script overwrites PYTHONPATH

Not served: Python started with -I, -E or -S, which ignores the environment or sitecustomize.
`quest list` shows the values of `attention`, `quest doctor` the plugins that work here.
"""


def main(argv: Sequence[str]) -> int:
    """Run the `quest run` command; return the exit status only if the command could not be started."""
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
    return 0  # not reached: the process is the command now


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command: the words after '--', or from the first word that is no option."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--":
            return words[:i], words[i + 1 :]
        value = i > 0 and words[i - 1] == "--host"
        if word == "-m" or not (value or word.startswith("-")):
            return words[:i], words[i:]
    return words, []
