"""Python imports this at start in every process below `quest run`: once a host is imported, its plugin is installed.

Standard library only, until a host is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def install(name: str) -> None:
    """Install the adapter of one plugin, in a process that has just imported its host."""
    try:
        from quest_core.registry import adapter
    except ImportError as error:
        raise ImportError(
            f"quest run: {sys.executable} has no quest-core, so the plugin '{name}' cannot be installed in it; "
            f"run the command with the Python that has, or: {sys.executable} -m pip install 'quest-{name}[host]'"
        ) from error
    adapter(name).install()


def watch() -> None:
    """Wait for the hosts that QUEST_RUN names, as plugin=module pairs."""
    spec: Any = importlib.util.spec_from_file_location("quest_import_hook", HERE.parent / "import_hook.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    for pair in filter(None, os.environ.get("QUEST_RUN", "").split(",")):
        name, _, module = pair.partition("=")
        hook.when_imported(module, partial(install, name))


def give_way() -> None:
    """Import the sitecustomize that this file hides, if there is one."""
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if not entry or Path(entry).resolve() != HERE]
    try:
        spec = importlib.util.find_spec("sitecustomize") if sys.modules.pop("sitecustomize", None) else None
        if spec is not None:
            __import__("sitecustomize")
    finally:
        sys.path[:] = [entry for entry in path if not entry or Path(entry).resolve() != HERE]


watch()
give_way()
