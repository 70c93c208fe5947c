"""quest run: start any training command with the plugins installed in every Python process it starts.

The command itself is not changed and not imported: `quest run` puts one folder on PYTHONPATH, whose
``sitecustomize.py`` Python imports at start, and replaces itself by the command. Once a process imports a host (tsai,
torch_geometric, ...), that host's adapter is installed, before anything of the host can be built. So the script is
`__main__` with its own sys.argv and sys.path, and torchrun, shell scripts and the trainers that start their own
processes are served alike.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import PluginError, QuestError
from .plugins import Plugin, find, plugins

FOLDER = Path(__file__).resolve().parent / "launched"
PAIRS = "QUEST_RUN"
"""The environment variable that names the plugins for processes below: "timm=timm,graphgps=torch_geometric!". A process
ends if a plugin with ! cannot be installed."""
LOOK = "QUEST_LOOK"
"""That of `quest watch` and `quest maps`: the JSON of what quest_core.tools.script does in a process below."""


def start(
    command: Sequence[str], chosen: Sequence[Plugin], *, required: bool = False, variables: Mapping[str, str] = {}
) -> NoReturn:
    """Replace this process by a command in whose Python processes plugins are installed.

    Args:
        command: a program and its arguments; a first word that ends in .py, or is -m, runs with this Python.
        chosen, required: as in `environment`.
        variables: what its environment has besides.

    Raises:
        QuestError: the program does not exist.
    """
    words = complete(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, environment(chosen, required) | dict(variables))


def choose_plugins(hosts: Sequence[str] | None) -> list[Plugin]:
    """Return the plugins of these names, or all whose host can be used; raise PluginError if there is none."""
    if hosts is not None:
        chosen = [find(name) for name in dict.fromkeys(hosts)]
        for plugin in chosen:
            if problem := plugin.problem():
                raise PluginError(f"plugin {plugin} cannot be used: {problem}; fix: {plugin.fix}")
        return chosen
    problems = {plugin: plugin.problem() for plugin in plugins()}
    usable = [plugin for plugin, problem in problems.items() if not problem]
    left_out = [f"plugin {plugin} is left out: {why}; fix: {plugin.fix}" for plugin, why in problems.items() if why]
    if not usable:
        found = "; ".join(left_out) or "none is installed; fix: pip install 'quest-<host>[host]'"
        raise PluginError(f"no plugin can be used here: {found}")
    for line in left_out:
        print(f"quest run: {line}", file=sys.stderr)
    return usable


def environment(chosen: Sequence[Plugin], required: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment `base` in which Python processes also install these plugins.

    If `required`, a process ends where one cannot be installed; else it writes one line to standard error.
    """
    others = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != FOLDER]
    mark = "!" if required else ""
    pairs = [f"{plugin.name}={module}{mark}" for plugin in chosen for module in plugin.modules]
    return {**base, "PYTHONPATH": os.pathsep.join([str(FOLDER), *others]), PAIRS: ",".join(pairs)}


def complete(command: Sequence[str]) -> list[str]:
    """Return the command, beginning with the path of its program; QuestError if the program does not exist."""
    words = list(command)
    if words[0].endswith(".py") or words[0] == "-m":
        words.insert(0, sys.executable)
    elif words[0] in ("python", "python3"):
        words[0] = sys.executable
    program = shutil.which(words[0])
    if program is None:
        hint = f"; '{words[0]}' is a file that cannot be executed" if Path(words[0]).exists() else ""
        raise QuestError(f"no program '{words[0]}'{hint}; the command was: {shlex.join(command)}")
    return [program, *words[1:]]
