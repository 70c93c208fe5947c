"""`quest doctor`: which installed plugins and packages of mechanisms work, and how to fix the others."""

import platform
import subprocess
import sys

import torch

from .. import __version__
from ..errors import check_sizes
from ..hosts.plugins import Plugin, is_importable, plugins
from ..registry import packages

LOAD = """
from quest_core.errors import PluginError
from quest_core.hosts.plugins import adapter
try:
    adapter({!r})
except PluginError as error:
    raise error.__cause__ or error from None
"""
"""The command of the child process that imports a plugin, and its host with it."""
MESSAGES = "https://quest-attention.github.io/quest/troubleshooting/"


def main(limit: int) -> int:
    """Import every plugin in a child process, for at most `limit` seconds; print what works; return 1 if one fails."""
    check_sizes(**{"--timeout": limit})
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["CPU"]
    versions = f"quest-core {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, {', '.join(devices)}")
    found = plugins()
    if not found:
        print("no plugin is installed; plain PyTorch needs none; for tsai: pip install 'quest-tsai[host]'")
    problems = [_report(str(plugin), plugin.host(), *examine(plugin, limit)) for plugin in found]
    problems += [_report(f"{one.owner} (mechanisms)", "", one.problem, one.fix) for one in packages()]
    return 1 if any(problems) else 0


def examine(plugin: Plugin, limit: int) -> tuple[str, str]:
    """Return why a plugin does not work and the command that fixes it; two empty texts if it works."""
    if problem := plugin.problem():
        return problem, plugin.fix
    failure = _run(LOAD.format(plugin.name), limit)
    if not failure:
        return "", ""
    for module in filter(is_importable, plugin.modules):
        if error := _run(f"import {module}", limit):
            fix = f"python -c 'import {module}' shows the whole error; {plugin.fix} --force-reinstall"
            return f"its host {plugin.host() or module} cannot be imported: {error}", fix
    fix = f"{MESSAGES} lists messages of hosts; if not this one, {plugin.fix} --force-reinstall"
    return f"it cannot be imported: {failure}", fix


def _run(code: str, limit: int) -> str:
    """Run code in a child process; return how it failed, in one line, or an empty text."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {limit} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ends the process with status {done.returncode}"


def _report(what: str, host: str, problem: str, fix: str) -> bool:
    """Print the line of a package, and the command that fixes it; return whether it has a problem."""
    print(f"  {what}{f' with {host}' if host else ''}: {problem or 'ok'}")
    if problem:
        print(f"    fix: {fix}")
    return bool(problem)
