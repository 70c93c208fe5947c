"""The commands `quest watch` and `quest maps`; :mod:`quest_core.tools.script` does the work in the script's process."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import PluginError, QuestError
from ..hosts.launch import choose_plugins, start
from .run import split

WATCH = """\
Start a training command and measure its attention at every n-th step: the largest logit, the entropy of the weights,
the norms of queries and keys. Works with any attention, QUEST or not, and without a change of the script. Prints a line
at most every ten seconds, says which logits grow and what unit keys would bound, and writes a page with curves at the
end.
"""
WATCH_EXAMPLES = """\
examples:
  quest watch -- python train.py --epochs 10
  quest watch --every 20 -- torchrun --nproc-per-node 2 train.py
  quest watch --draw quest-watch/2026-11-25-140000       the page of a run that was killed
"""
MAPS = """\
Start a command that runs a model, and draw the attention of the model's first call: of the first sample, a picture of
the weights of every head of every layer, and one of what each key gets, over the patches of an image or under its
token. Works with any attention, QUEST or not, fused or written out, and without a change of the script.
"""
MAPS_EXAMPLES = """\
examples:
  quest maps -- python predict.py
  quest maps --query 0 -- python predict.py              the weights of query 0, for example a class token
  quest maps --tokens "a cat sat" -- python predict.py   these words under the keys, in place of the numbers of tokens
  quest maps --call 500 -- python train.py               the 500th call
  quest maps -- python -c "import timm, torch; timm.create_model('vit_tiny_patch16_224')(torch.rand(1, 3, 224, 224))"

in Python:
  from quest_core.tools.pictures import draw_maps; draw_maps(model, batch, "cat", image=batch)
"""


def watch(argv: Sequence[str]) -> int:
    """Run the `quest watch` command."""
    parser = _parser("watch", "[--every N]", WATCH, WATCH_EXAMPLES)
    parser.add_argument("--every", metavar="N", type=int, default=100, help="measure every N-th step (default: 100)")
    parser.add_argument("--draw", metavar="DIR", type=Path, help="only draw the page of what DIR holds")
    given, command = _parse(parser, argv, "--every", "--draw")
    if given.draw is not None:
        from ..tools.curves import draw

        page = draw(given.draw)
        if page is None:
            raise QuestError(f"quest watch: {given.draw} holds no measurement (a file watch.jsonl)")
        print(page)
        return 0
    if given.every < 1:
        parser.error(f"--every is {given.every}; expected at least 1")
    folder = _folder(parser, given.out, command)
    _start(command, "QUEST_WATCH", f"{given.every}:{folder}")


def maps(argv: Sequence[str]) -> int:
    """Run the `quest maps` command."""
    parser = _parser("maps", "[--query N] [--tokens WORDS]", MAPS, MAPS_EXAMPLES)
    parser.add_argument("--query", metavar="N", type=int, help="the query of the second picture (default: their mean)")
    parser.add_argument("--tokens", metavar="WORDS", help="words under the keys, separated by spaces")
    parser.add_argument("--call", metavar="N", type=int, default=1, help="draw the N-th call of a model (default: 1)")
    given, command = _parse(parser, argv, "--query", "--tokens", "--call")
    if given.call < 1:
        parser.error(f"--call is {given.call}; expected at least 1")
    tokens = given.tokens.split() if given.tokens else None
    folder = str(_folder(parser, given.out, command))
    asked = {"folder": folder, "call": given.call, "query": given.query, "tokens": tokens}
    _start(command, "QUEST_MAPS", json.dumps(asked))


def _parser(name: str, usage: str, words: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"quest {name}",
        usage=f"quest {name} {usage} [--out DIR] [--] COMMAND ...",
        description=words,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"default: quest-{name}/<the time>")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str], *valued: str) -> tuple[argparse.Namespace, list[str]]:
    """Return our options and the command."""
    options, command = split(argv, valued=("--out", *valued))
    given = parser.parse_args(options)
    if importlib.util.find_spec("matplotlib") is None:
        raise QuestError(
            f"{parser.prog} draws with matplotlib, which is not installed; pip install 'quest-core[watch]'"
        )
    return given, command


def _folder(parser: argparse.ArgumentParser, out: Path | None, command: Sequence[str]) -> Path:
    """Return the folder of the results; exit with a message if the command is missing."""
    if not command:
        parser.error(f"nothing to run; write for example: {parser.prog} -- python train.py")
    folder = out or Path(parser.prog.replace(" ", "-")) / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise QuestError(f"{parser.prog}: {folder} is not empty; choose another --out, or remove it")
    return folder.resolve()


def _start(command: Sequence[str], variable: str, value: str) -> NoReturn:
    try:
        plugins = choose_plugins(None)
    except PluginError:  # plain PyTorch needs none
        plugins = []
    start(command, plugins, variables={variable: value})
