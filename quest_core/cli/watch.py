"""The `quest watch` command; :mod:`quest_core.tools.script` does the work in the watched process."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ..errors import PluginError, QuestError
from ..hosts.launch import start, wanted
from .run import split

DESCRIPTION = """\
Start a training command and measure its attention at every n-th step: the largest logit, the entropy of the weights,
the norms of queries and keys. Works with any attention, QUEST or not, and without a change of the script. Prints a line
for each measurement, says which logits grow and what unit keys would bound, and writes a page with curves at the end.
"""
EPILOG = """\
examples:
  quest watch -- python train.py --epochs 10
  quest watch --every 20 -- torchrun --nproc-per-node 2 train.py
  quest watch --draw quest-watch/2026-11-25-140000       the page of a run that was killed
"""


def main(argv: Sequence[str]) -> int:
    """Run the `quest watch` command."""
    parser = argparse.ArgumentParser(
        prog="quest watch",
        usage="quest watch [--every N] [--out DIR] [--] COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--every", metavar="N", type=int, default=100, help="measure every N-th step (default: 100)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: quest-watch/<the time>")
    parser.add_argument("--draw", metavar="DIR", type=Path, help="only draw the page of what DIR holds")
    options, command = split(argv, valued=("--every", "--out", "--draw"))
    given = parser.parse_args(options)
    if importlib.util.find_spec("matplotlib") is None:
        raise QuestError("quest watch draws with matplotlib, which is not installed; pip install 'quest-core[watch]'")
    if given.draw is not None:
        from ..tools.curves import draw

        page = draw(given.draw)
        if page is None:
            raise QuestError(f"quest watch: {given.draw} holds no measurement (a file watch.jsonl)")
        print(page)
        return 0
    if given.every < 1:
        parser.error(f"--every is {given.every}; expected at least 1")
    if not command:
        parser.error("nothing to run; write for example: quest watch -- python train.py")
    folder = given.out or Path("quest-watch") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise QuestError(f"quest watch: {folder} is not empty; choose another --out, or remove it")
    try:
        plugins = wanted(None)
    except PluginError:  # plain PyTorch needs none
        plugins = []
    start(command, plugins, QUEST_WATCH=f"{given.every}:{folder.resolve()}")
