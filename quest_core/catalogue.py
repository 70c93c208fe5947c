"""Every mechanism by name, in-tree and installed. A package that cannot be used is a record with its cause."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from . import mechanisms
from .errors import PluginError, one_of
from .mechanisms.part import Part
from .packages import ONE_AT_A_TIME, Entry, contained, entries


class Catalogue(Mapping[str, Part]):
    """Mechanisms by name. In-tree names are found without a look at other packages.

    Other packages are imported when an unknown name is asked for, or when all names are.

    Attributes:
        own: the mechanisms in-tree.
        owners: the distribution of each mechanism that is known so far, with its version unless it is quest-core.
    """

    def __init__(self) -> None:
        self.own = {part.name: part for part in mechanisms.PARTS}
        self._all: dict[str, Part] | None = None
        self.owners = dict.fromkeys(self.own, "quest-core")
        self._unusable: list[str] = []

    def __getitem__(self, name: str) -> Part:
        return self.own[name] if name in self.own else self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def owner(self, name: str) -> str:
        """Return the distribution of a mechanism, with its version unless it is quest-core."""
        return self.owners[self[name].name]

    def unknown(self, name: str) -> str:
        """Return why `name` is not a mechanism here, with the nearest names and the packages that cannot be used."""
        return "; ".join([f"'{name}' is not a mechanism; {one_of(name, self)}", *self._unusable])

    def close(self) -> None:
        """Import no other package from now on."""
        if self._all is None:
            self._all = dict(self.own)

    def _load(self) -> dict[str, Part]:
        with ONE_AT_A_TIME:
            if self._all is None:  # a package that asks for names while it is imported finds those before it
                self._all = dict(self.own)
                for entry in entries("quest.attention"):
                    try:
                        for part in load_parts(entry, self.owners):
                            self._all[part.name], self.owners[part.name] = part, entry.owner
                    except PluginError as error:
                        what = f"mechanisms '{entry.name}' of {entry.owner}"
                        self._unusable.append(f"not usable: {what}: {error}; fix: {entry.fix}")
            return self._all


@functools.cache
def parts() -> Catalogue:
    """Return every mechanism by name: those of quest_core, and those that packages add under `quest.attention`."""
    return Catalogue()


def available() -> list[str]:
    """Return the names that `attention=` accepts: scores, families, and normalisers and groupings after a '+'."""
    return sorted(parts())


def load_parts(entry: Entry, owners: Mapping[str, str]) -> list[Part]:
    """Import one package and return its mechanisms. Either all of them can be used or none.

    Args:
        entry: its entry point.
        owners: name -> distribution of the mechanisms that exist.

    Raises:
        PluginError: the package cannot be imported, or adds something else, or a name that exists.
    """
    found = entry.load()
    with contained(entry.value):  # even a list can run code of the package
        if not isinstance(found, list | tuple):
            raise TypeError(f"{entry.value} is {_kind(found)}, not a list of Part")
        parts = list(found)
        for i, part in enumerate(parts):
            if not isinstance(part, Part):
                raise TypeError(f"item {i} of {entry.value} is {_kind(part)}, not a Part")
    problem = taken([part.name for part in parts], owners)
    if problem:
        raise PluginError(problem)
    return parts


def taken(names: Iterable[str], owners: Mapping[str, str]) -> str:
    """Return why a package cannot add mechanisms of these names, or an empty text."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return f"it adds '{name}' twice"
        if name in owners:
            return f"'{name}' is a mechanism of {owners[name]}"
        seen.add(name)
    return ""


def _kind(found: object) -> str:
    return f"{'an' if type(found).__name__[0] in 'aeiou' else 'a'} {type(found).__name__}"
