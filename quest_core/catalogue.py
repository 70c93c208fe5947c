"""Every mechanism by name, in-tree and installed. A package that cannot be used is a record with its cause."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from . import mechanisms
from .errors import PluginError, one_of
from .mechanisms.part import Part
from .packages import ONE_AT_A_TIME, Entry, contained, entries


@dataclass(frozen=True)
class Package:
    """What one entry point of `quest.attention` adds."""

    entry: Entry
    parts: tuple[Part, ...] = ()  # its mechanisms; empty if it cannot be used
    refused: tuple[str, ...] = ()  # the names that it would add, if they are known and it cannot be used
    problem: str = ""  # the cause; empty if it can be used

    def __str__(self) -> str:
        return f"'{self.entry.name}' of {self.entry.owner}: {self.problem}; fix: {self.entry.fix}"


class Catalogue(Mapping[str, Part]):
    """Mechanisms by name. In-tree names are found without a look at other packages.

    Other packages are imported when an unknown name is asked for, or when all names are.
    """

    def __init__(self) -> None:
        self.own = {part.name: part for part in mechanisms.PARTS}  # need no import
        self._all: dict[str, Part] | None = None
        self.owners = dict.fromkeys(self.own, "quest-core")  # name -> distribution, with the version of others
        self._packages: list[Package] = []

    def __getitem__(self, name: str) -> Part:
        return self.own[name] if name in self.own else self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def owner(self, name: str) -> str:
        """Return the distribution of a mechanism, with its version unless it is quest-core."""
        return self.owners[self[name].name]

    @property
    def packages(self) -> list[Package]:
        """Every package that adds mechanisms, whether it can be used or not."""
        self._load()
        return self._packages

    def unknown(self, name: str) -> str:
        """Return why `name` is not a mechanism here, with the nearest names and the packages that cannot be used."""
        broken = [package for package in self.packages if package.problem]
        for package in broken:
            if name in package.refused:
                return f"'{name}' cannot be used: {package}"
        text = f"'{name}' is not a mechanism; {one_of(name, self)}"
        return "; ".join([text, *(f"not usable: mechanisms {package}" for package in broken)])

    def only(self, entry: Entry) -> Package:
        """Import the package of this entry point, and no other from now on; returns what it adds."""
        self._load([entry])
        return self._packages[0]

    def _load(self, found: Iterable[Entry] | None = None) -> dict[str, Part]:
        with ONE_AT_A_TIME:
            if self._all is None:  # a package that asks for names while it is imported finds those before it
                self._all = dict(self.own)
                for entry in entries("quest.attention") if found is None else found:
                    package = examine(entry, self.owners)
                    self._packages.append(package)
                    self._all.update((part.name, part) for part in package.parts)
                    self.owners.update((part.name, entry.owner) for part in package.parts)
            return self._all


@functools.cache
def parts() -> Catalogue:
    """Return every mechanism by name: those of quest_core, and those that packages add under `quest.attention`."""
    return Catalogue()


def list_mechanisms() -> list[str]:
    """Return the names that `attention=` accepts: scores, families, and normalizers and groupings after a '+'."""
    return sorted(parts())


def examine(entry: Entry, owners: Mapping[str, str]) -> Package:
    """Import one package and check what it adds. Either all of its mechanisms can be used or none.

    Args:
        entry: its entry point.
        owners: name -> distribution of the mechanisms that exist.
    """
    names: tuple[str, ...] = ()
    try:
        found = entry.load()
        with contained(entry.value):  # even a list can run code of the package
            if not isinstance(found, list | tuple):
                return Package(entry, problem=f"{entry.value} is {_kind(found)}, not a list of Part")
            found = tuple(found)
            for i, part in enumerate(found):
                if type(part) is not Part:  # a subclass could change its declarations after this
                    return Package(entry, problem=f"item {i} of {entry.value} is {_kind(part)}, not a Part")
            names = tuple(part.name for part in found)
            problem = taken(names, owners)
            if not problem:
                return Package(entry, parts=found)
    except PluginError as error:
        problem = str(error)
    return Package(entry, refused=names, problem=problem)


def taken(names: Iterable[str], owners: Mapping[str, str]) -> str:
    """Return why a package cannot add mechanisms of these names, or an empty text.

    Names that differ only in case or in ``-``, ``_`` and ``.`` are the same: a misspelt one must be an error.
    """
    known, seen = {canonicalize_name(name): name for name in owners}, set()
    for name in names:
        same = canonicalize_name(name)
        if same in seen:
            return f"it adds '{name}' twice"
        if same in known:
            alike = "" if known[same] == name else f"'{name}' is too much like '{known[same]}': "
            return f"{alike}'{known[same]}' is a mechanism of {owners[known[same]]}"
        seen.add(same)
    return ""


def _kind(found: object) -> str:
    return f"{'an' if type(found).__name__[0] in 'aeiou' else 'a'} {type(found).__name__}"
