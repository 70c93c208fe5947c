"""Load what other distributions add to QUEST, each on its own, so that a broken one disables only itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from .errors import PluginError

HERE = str(Path(__file__).parent)
SLOW_S = 2.0
"""An import that takes longer is named on standard error."""

ONE_AT_A_TIME = threading.RLock()
"""Held while a package is imported, because sys.stdout is global."""


@dataclass(frozen=True)
class Entry:
    """One entry point of an installed distribution.

    Attributes:
        group: "quest.attention", "quest.adapter_info", "quest.adapters" or "quest.commands".
        name: what stands before the equals sign.
        value: "module:attribute".
        distribution: the distribution's name, as pip knows it.
        version: its version.
        summary: its one-line description.
        requires: its requirements, as its metadata spells them.
        extras: the names of its extras.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}"

    @property
    def fix(self) -> str:
        """The commands that end a fault of this distribution."""
        return remedy(self.distribution)

    def load(self) -> Any:
        """Import the module and return the attribute; whatever goes wrong is a PluginError with the cause."""
        with contained(f"{self.value.partition(':')[0]} of {self.owner}"):
            return importlib.metadata.EntryPoint(self.name, self.value, self.group).load()


def remedy(distribution: str) -> str:
    """Return the commands that end a fault of a distribution."""
    return f"pip install --upgrade {distribution}, or pip uninstall {distribution}"


def entries(group: str) -> list[Entry]:
    """Return the entry points of a group, sorted by name. Imports nothing and never raises.

    Where several distributions use one name, ``quest-<name>`` comes first, then the others in alphabetical order. A
    distribution whose metadata cannot be read is left out, as it is by pip.
    """
    found: dict[str, list[Entry]] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):
            points = distribution.entry_points.select(group=group)
            if points:
                about = distribution.metadata
                facts: dict[str, Any] = {
                    "distribution": about["Name"],
                    "version": about["Version"] or "?",
                    "summary": about["Summary"] or "",
                    "requires": tuple(about.get_all("Requires-Dist") or ()),
                    "extras": tuple(about.get_all("Provides-Extra") or ()),
                }
                # The first of a name on sys.path is the one that is imported.
                found.setdefault(
                    canonicalize_name(about["Name"]), [Entry(group, p.name, p.value, **facts) for p in points]
                )
    return sorted(
        (entry for entries in found.values() for entry in entries),
        key=lambda e: (e.name, e.distribution != f"quest-{e.name}", canonicalize_name(e.distribution)),
    )


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """Run code of another distribution.

    Its prints go to standard error. If it takes longer than SLOW_S, one line on standard error names it.

    Args:
        what: the module and its distribution, for that line.

    Raises:
        PluginError: the code raised anything but KeyboardInterrupt, SystemExit included; the message is the cause.
    """
    named = threading.Timer(SLOW_S, lambda: print(f"quest: waiting for the import of {what}", file=sys.stderr))
    named.daemon = True
    with ONE_AT_A_TIME, contextlib.redirect_stdout(sys.stderr):
        named.start()
        try:
            yield
        except KeyboardInterrupt:  # Ctrl-C ends the program
            raise
        except BaseException as error:
            raise PluginError(cause(error)) from error
        finally:
            named.cancel()


def cause(error: BaseException) -> str:
    """Return an error in one line, with the last place outside of quest_core that it came from."""
    if isinstance(error, SystemExit):
        text = f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(HERE) and "importlib" not in frame.filename
    ]
    return f"{text} ({places[-1]})" if places else text
