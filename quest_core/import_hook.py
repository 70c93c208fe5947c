"""when_imported: act on a module at the moment somebody imports it, whatever the order of imports.

Standard library only, and loadable without the package around it: `quest run` uses it in every Python process below
it, where importing quest_core, and PyTorch with it, would cost seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once: now if the module `name` is imported already, else right after its import.

    The code that imports it continues when the action is through. What the action raises, the import raises; the
    module then is not imported, and another attempt calls the actions again.

    Args:
        name: dotted name of a module, which need not exist.
        action: what to do.
    """
    if name in sys.modules:
        action()
        return
    _finder.waiting.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Lets the other finders find a module that is waited for, and has its loader call the actions."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.finding: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting or name in self.finding:
            return None
        self.finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding.discard(name)
        if spec is None or spec.loader is None:
            return spec
        # The module keeps its own loader, which others ask for sources and data files.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                for action in list(self.waiting.get(name, [])):
                    action()
                self.waiting.pop(name, None)  # an action that failed is due again at the next attempt to import

        loader.exec_module = exec_module
        return spec


_finder = _Finder()
