"""`quest run`, `quest watch` and `quest maps`: start a command, with the plugins installed or its models looked into.

:mod:`quest_core.hosts.launch` starts it, and :mod:`quest_core.tools.script` looks into the models in its process.
"""

import argparse
import datetime
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from ..errors import PluginError, QuestError, check_sizes
from ..hosts import launch

RUN = """\
Start a training command with QUEST's plugins installed, so that its configs accept `attention`. The command is not
changed: a plugin is installed as soon as its framework is imported, in every Python process that the command starts
(torchrun, shell scripts, data loaders), unless it sets PYTHONPATH or runs Python with -I, -E or -S.
"""
RUN_EXAMPLES = """\
examples:
  quest run -- python main.py --cfg pattern.yaml gt.attention quest
  quest run train.py --epochs 10                      the same as: quest run -- python train.py --epochs 10
  quest run -- torchrun --nproc-per-node 2 main.py    any program; a plain `python` is the one that runs quest
"""
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
TEXTS = {
    "run": ("start a training command with the plugins installed", RUN, RUN_EXAMPLES),
    "watch": ("start a training command and measure its attention", WATCH, WATCH_EXAMPLES),
    "maps": ("start a command and draw the attention of its model", MAPS, MAPS_EXAMPLES),
}
"""What `quest --help` says of a command; its description and examples."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "run": {
        "--host": {
            "metavar": "NAME",
            "action": "append",
            "help": "install only this plugin, and fail if it does not work; repeat it for others (default: all that "
            "work)",
        },
    },
    "watch": {
        "--every": {"metavar": "N", "type": int, "default": 100, "help": "measure every N-th step (default: 100)"},
        "--draw": {"metavar": "DIR", "type": Path, "help": "only draw the page of what DIR holds"},
        "--out": {"metavar": "DIR", "type": Path, "help": "default: quest-watch/<the time>"},
    },
    "maps": {
        "--query": {"metavar": "N", "type": int, "help": "the query of the second picture (default: their mean)"},
        "--tokens": {"metavar": "WORDS", "type": str.split, "help": "words under the keys, separated by spaces"},
        "--call": {"metavar": "N", "type": int, "default": 1, "help": "draw the N-th call of a model (default: 1)"},
        "--out": {"metavar": "DIR", "type": Path, "help": "default: quest-maps/<the time>"},
    },
}


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands to those of `quest`."""
    for name, (summary, words, examples) in TEXTS.items():
        parser = commands.add_parser(
            name,
            help=f"{summary} (quest {name} --help)",
            usage=f"quest {name} [OPTIONS] [--] COMMAND ...",
            description=words,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for option, how in OPTIONS[name].items():
            parser.add_argument(option, **how)
        # All words from the first that is not ours belong to the command.
        parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.set_defaults(action=run if name == "run" else look)


def command_of(given: argparse.Namespace) -> list[str]:
    """Return the words of the command to start; QuestError if there is none."""
    words: list[str] = given.words[1:] if given.words[:1] == ["--"] else given.words
    if given.module is not None:
        words = ["-m", *given.module, *given.words]
    if not words:
        raise QuestError(f"nothing to run; write for example: quest {given.command} -- python train.py")
    return words


def run(given: argparse.Namespace) -> NoReturn:
    """Run the `quest run` command."""
    words = command_of(given)
    launch.start(words, launch.choose_plugins(given.host), required=given.host is not None)


def look(given: argparse.Namespace) -> int:
    """Run the `quest watch` or the `quest maps` command."""
    name = f"quest {given.command}"
    if importlib.util.find_spec("matplotlib") is None:
        raise QuestError(f"{name} draws with matplotlib, which is not installed; pip install 'quest-core[watch]'")
    if given.command == "maps":
        check_sizes(**{"--call": given.call})
        asked = {"call": given.call, "query": given.query, "tokens": given.tokens or None}
    elif given.draw is None:
        check_sizes(**{"--every": given.every})
        asked = {"every": given.every}
    else:
        from ..tools.curves import draw

        page = draw(given.draw)
        if page is None:
            raise QuestError(f"{name}: {given.draw} holds no measurement (a file watch.jsonl)")
        print(page)
        return 0
    words = command_of(given)
    if launch.LOOK in os.environ:
        raise QuestError(f"{name} is started by another quest watch or quest maps; run one at a time")
    folder = given.out or Path(f"quest-{given.command}") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise QuestError(f"{name} cannot write into {folder}, because {place} is not a writable folder; choose --out")
    if folder.exists() and any(folder.iterdir()):
        raise QuestError(f"{name}: {folder} is not empty; choose another --out, or remove it")
    try:
        plugins = launch.choose_plugins(None)
    except PluginError:  # plain PyTorch needs none
        plugins = []
    asked |= {"command": given.command, "folder": str(folder.resolve())}
    launch.start(words, plugins, variables={launch.LOOK: json.dumps(asked)})
