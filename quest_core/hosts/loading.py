"""The adapters of installed plugins, imported when a model may need them."""

from __future__ import annotations

import functools
import sys

from torch import nn

from ..errors import PluginError, QuestError
from ..notices import say
from ..packages import Entry, contained, entries
from .adapter import Adapter, Capabilities, Site
from .discovery import Record, discover, find
from .torch import TorchAdapter


def adapter(name: str) -> Adapter:
    """Return the adapter of an installed plugin, or that of plain PyTorch, "torch".

    Raises:
        PluginError: the plugin is missing or not ok; the message says what was found and the command that fixes it.
    """
    return TorchAdapter() if name == TorchAdapter.name else load_adapter(find(name))


@functools.cache
def _loaded(entry: Entry) -> Adapter:
    kind = entry.load()
    with contained(entry.value):
        made = kind()
        if not isinstance(made, Adapter):
            raise TypeError(f"{entry.value} makes {type(made).__name__}, not an Adapter")
        for key, wanted in (("name", str), ("capabilities", Capabilities), ("leaves_alone", frozenset)):
            if not isinstance(getattr(made, key, None), wanted):
                raise TypeError(f"{key} of {entry.value} is {getattr(made, key, None)!r}, not a {wanted.__name__}")
    return made


def load_adapter(record: Record) -> Adapter:
    """Return the adapter of a record; raise PluginError unless the record is ok and its adapter imports."""
    record.require()
    plugin = f"plugin '{record.name}' ({record.distribution} {record.version})"
    for entry in entries("quest.adapters"):
        if (entry.name, entry.distribution) == (record.name, record.distribution):
            try:
                return _loaded(entry)
            except PluginError as error:
                raise PluginError(f"{plugin} fails to import: {error}; `quest doctor` names the fix") from error
    raise PluginError(
        f"{plugin} has info but no adapter under the entry-point group quest.adapters; "
        f"fix: pip install --upgrade {record.distribution}"
    )


_say_once = functools.cache(say)


def running_adapters(model: nn.Module | None = None) -> list[Adapter]:
    """Return the adapters whose host is imported in this process: those that a model at hand can belong to.

    A plugin whose adapter does not import, or cannot look for its sites in `model`, is left out with a notice.
    """
    found = []
    for record in discover():
        if any(str(record.info.get(key, "")) in sys.modules for key in ("module", "checkout")):
            try:
                made = load_adapter(record)
                if model is not None:
                    try_sites(made, model)
            except PluginError as error:
                _say_once(str(error))
            else:
                found.append(made)
    return found


def try_sites(made: Adapter, model: nn.Module) -> None:
    """Raise PluginError if an adapter cannot look for its sites in `model`. It may refuse the model by a QuestError."""
    where = f"{type(made).__module__}.{type(made).__name__}"
    try:
        with contained(f"{where}.sites"):
            try:
                junk = [s for s in made.sites(model) if not isinstance(s, Site) or not isinstance(s.path, str)]
            except QuestError:
                return  # the adapter refuses the model on purpose: `inject` raises it again
            if junk:
                raise TypeError(f"it gives {junk[0]!r:.100}, not Site with a path")
    except PluginError as error:
        raise PluginError(f"{where} cannot look for sites in a model: {error}") from error
