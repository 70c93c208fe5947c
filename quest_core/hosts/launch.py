"""quest run: start any training command with the plugins installed in every Python process it starts.

The command itself is not changed and not imported: `quest run` puts one folder on PYTHONPATH, whose
``sitecustomize.py`` Python imports at start, and replaces itself by the command. Once a process imports a host (tsai,
torch_geometric, ...), that host's adapter is installed, before anything of the host can be built. So the script is
`__main__` with its own sys.argv and sys.path, and torchrun, shell scripts and the trainers that start their own
processes are served alike.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import PluginError, QuestError
from .discovery import Record, discover, find

FOLDER = Path(__file__).resolve().parent / "launched"
PAIRS = "QUEST_RUN"  # the environment variable that names the plugins for processes below: plugin=module, ...


def run(command: Sequence[str], hosts: Sequence[str] | None = None) -> None:
    """Replace this process by a command in whose Python processes the plugins are installed.

    Args:
        command: a program and its arguments; a first word that ends in .py, or is -m, runs with this Python.
        hosts: the plugins to install; None means all that work here.

    Raises:
        PluginError: a plugin does not exist or cannot be used here; or none can.
        QuestError: the program does not exist, or Python ignores the environment.
    """
    variables = environment(wanted(hosts))
    words = complete(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, variables)


def wanted(hosts: Sequence[str] | None) -> list[Record]:
    """Return the plugins of these names, or all that work; raises PluginError."""
    if hosts is not None:
        chosen = [find(name) for name in dict.fromkeys(hosts)]
        for record in chosen:
            record.require()
            if "module" not in record.info:
                raise PluginError(f"plugin '{record.name}' has no host, so it has nothing to install in a command")
        return chosen
    records = [record for record in discover() if record.status != "ok" or "module" in record.info]
    able = [record for record in records if record.status == "ok"]
    if not able:
        found = "; ".join(f"{r.name} is {r.status} ({r.detail}; fix: {r.fix})" for r in records)
        raise PluginError(f"no plugin can be used here: {found or 'none is installed; pip install quest-<host>'}")
    return able


def environment(records: Sequence[Record], base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the process environment in which the plugins of `records` are installed."""
    others = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != FOLDER]
    pairs = [f"{r.name}={r.info[key]}" for r in records for key in ("module", "checkout") if key in r.info]
    return {**base, "PYTHONPATH": os.pathsep.join([str(FOLDER), *others]), PAIRS: ",".join(pairs)}


def complete(command: Sequence[str]) -> list[str]:
    """Return the command, beginning with the path of its program; QuestError if it cannot run with plugins."""
    words = list(command)
    if words[0].endswith(".py") or words[0] == "-m":
        words.insert(0, sys.executable)
    elif words[0] in ("python", "python3"):
        words[0] = sys.executable
    program = shutil.which(words[0])
    if program is None:
        hint = f"; '{words[0]}' is a file that cannot be executed" if Path(words[0]).exists() else ""
        raise QuestError(f"quest run: no program '{words[0]}'{hint}; the command was: {shlex.join(command)}")
    if Path(program).name.startswith("python"):
        _refuse_isolation(words[1:])
    return [program, *words[1:]]


def _refuse_isolation(arguments: Sequence[str]) -> None:
    """Raise QuestError if an option keeps Python from importing what installs the plugins."""
    for before, word in itertools.pairwise(["", *arguments]):
        option = re.match(r"-[bBdiOPqsuvx]*(.?)", word)  # letters may share a dash: -um is -u -m
        if option is None and before not in ("-W", "-X"):
            return  # the script, whose options follow
        letter = "" if option is None else option[1]
        if letter in ("c", "m"):
            return
        if letter in ("I", "E", "S"):
            raise QuestError(
                f"quest run: Python's option -{letter} ignores PYTHONPATH or sitecustomize, by which plugins are "
                f"installed, so the command would run without them; leave out -{letter}"
            )
