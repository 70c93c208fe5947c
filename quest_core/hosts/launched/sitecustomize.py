"""Python imports this at start in every process below `quest run`: once a host is imported, its plugin is installed.

Standard library only, until a host is imported.
"""

import importlib.util
import os
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def install(name: str, required: bool) -> None:
    """Install the adapter of one plugin, in a process that has just imported its host."""
    try:
        from quest_core.hosts.plugins import adapter

        adapter(name).install()
    except Exception as error:
        text = f"quest run: the plugin '{name}' cannot be installed in {sys.executable}: {error!r}"
        if required:
            raise RuntimeError(text) from error  # no ImportError: scripts take that for a host that is not there
        print(text, file=sys.stderr)


def measure() -> None:
    """Begin what `quest watch` or `quest maps` asks for, in a process that has just imported PyTorch."""
    from quest_core.tools.script import start

    start()


def watch() -> None:
    """Wait for the hosts that QUEST_RUN names, as plugin=module pairs, and for PyTorch if models are looked into."""
    spec: Any = importlib.util.spec_from_file_location("quest_patching", HERE.parent / "patching.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    for pair in filter(None, os.environ.get("QUEST_RUN", "").split(",")):
        name, _, module = pair.partition("=")
        hook.when_imported(module.rstrip("!"), partial(install, name, module.endswith("!")))
    if os.environ.get("QUEST_LOOK"):
        hook.when_imported("torch", measure)


def give_way() -> None:
    """Leave sys.path, and run the sitecustomize that this file hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


watch()
give_way()
