"""Patches: changes to a host's modules and classes, each made once, in any order of imports, and undone together.

Standard library only, and loadable without the package around it: `quest run` uses it in every Python process below
it, where importing quest_core, and PyTorch with it, would cost seconds.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Patches:
    """The changes of a plugin in its host.

    >>> patches = Patches()
    >>> patches.around("host.layers:Block", "__init__", with_attention)  # as soon as host.layers is imported
    >>> patches.undo()
    """

    def __init__(self) -> None:
        self._undoes: dict[object, Callable[[], object]] = {}  # what was done -> how to undo it
        self._changed: list[tuple[Any, str, Any]] = []

    def __iter__(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield (owner, name, original) of every change; `original` is None if the owner only inherited the name."""
        return iter(self._changed)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(owner.name)`, unless this object has done so already.

        A classmethod or staticmethod stays one; `make` takes its function.
        """
        if (id(owner), name) not in self._undoes:
            held: Any = next((vars(kind)[name] for kind in getattr(owner, "__mro__", ()) if name in vars(kind)), None)
            kind = type(held) if isinstance(held, classmethod | staticmethod) else None
            self.put(owner, name, kind(make(held.__func__)) if kind else make(getattr(owner, name)))

    def around(self, owner: Any, name: str, change: Callable[..., Any], *, everywhere: bool = False) -> None:
        """Let every call of the function `owner.name` go to `change`, as `wrap` does.

        Args:
            owner: a module, class or object; or as text ``"package.module"`` or ``"package.module:Class"``, which are
                changed as soon as they are imported.
            change: takes the original and what it is called with: ``change(original, *arguments, **options)``.
            everywhere: also in every module that has imported the function by name; `undo` finds later imports too.
        """
        if isinstance(owner, str):
            module, _, kind = owner.partition(":")

            def now() -> None:
                imported = sys.modules[module]
                self.around(getattr(imported, kind) if kind else imported, name, change, everywhere=everywhere)

            self.when_imported(module, now)
            return

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*arguments: Any, **options: Any) -> Any:
                return change(original, *arguments, **options)

            return wrapper

        if everywhere:
            stock = getattr(owner, name)
            ours = make(stock)
            key = f"{owner.__name__}.{name}"
            self.once(key, lambda: _exchange(name, stock, ours), lambda: _exchange(name, ours, stock))
            return
        self.wrap(owner, name, make)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`, unless this object has done so already."""
        if (id(owner), name) not in self._undoes:
            original = vars(owner).get(name)
            delete = functools.partial(delattr, owner, name)
            undo = functools.partial(setattr, owner, name, original) if name in vars(owner) else delete
            self._changed.append((owner, name, original))
            self.once((id(owner), name), lambda: setattr(owner, name, value), undo)

    def once(self, name: object, do: Callable[[], object], undo: Callable[[], object]) -> None:
        """Call `do`, unless this object has done so under `name` already; the method `undo` calls `undo`.

        For changes that are not attributes: entries of a registry, a handler of a logger.
        """
        if name not in self._undoes:
            do()
            self._undoes[name] = undo

    def when_imported(self, module: str, action: Callable[[], None]) -> None:
        """Call the function `when_imported`; `undo` withdraws an action that is still waiting."""
        self.once((module, action), lambda: when_imported(module, action), lambda: _finder.withdraw(module, action))

    def undo(self) -> None:
        """Restore what stood before, the latest change first; then all of it can be made again."""
        while self._undoes:
            self._undoes.popitem()[1]()
        self._changed.clear()


def _exchange(name: str, old: Any, new: Any) -> None:
    """Replace what every imported module has under `name`, where it is `old`."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once: now if the module `name` is imported already, else right after its import.

    An error of the action is raised by the import; the module then is not imported, and another attempt calls the
    actions again.
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

    def withdraw(self, name: str, action: Callable[[], None]) -> None:
        left = [other for other in self.waiting.pop(name, []) if other is not action]
        if left:
            self.waiting[name] = left

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
