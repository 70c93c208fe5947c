"""Load what other distributions add to QUEST, each on its own, so that a broken one disables only itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import signal
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
SLOW_S = 2.0  # an import that takes longer is named on standard error
ONE_AT_A_TIME = threading.RLock()
"""Held while a package is imported, because sys.stdout and the signal handlers are global."""


@dataclass(frozen=True)
class Entry:
    """One entry point of an installed distribution."""

    group: str  # "quest.attention", "quest.adapter_info", "quest.adapters" or "quest.commands"
    name: str  # what stands before the equals sign
    value: str  # "module:attribute"
    distribution: str  # its name, as pip knows it
    version: str
    summary: str = ""
    requires: tuple[str, ...] = ()  # its requirements, as its metadata spells them
    extras: tuple[str, ...] = ()
    problem: str = ""  # why its metadata cannot be read, and it cannot be used; else empty

    @property
    def owner(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}"

    @property
    def fix(self) -> str:
        """The commands that end a fault of this distribution."""
        return f"pip install --upgrade {self.distribution}, or pip uninstall {self.distribution}"

    def load(self) -> Any:
        """Import the module and return the attribute; whatever goes wrong is a PluginError with the cause."""
        if self.problem:
            raise PluginError(self.problem)
        with contained(f"{self.value.partition(':')[0]} of {self.owner}"):
            point = importlib.metadata.EntryPoint(self.name, self.value, self.group)
            if not point.pattern.match(self.value):
                raise ValueError(f"the entry point is {self.value!r}; it must be 'module:attribute'")
            return point.load()


def facts(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Return the fields of an Entry that depend only on its distribution; after its .dist-info folder if unreadable."""
    try:
        about = distribution.metadata
        if not about["Name"]:
            raise ValueError("METADATA has no Name")
        return {
            "distribution": about["Name"],
            "version": about["Version"] or "?",
            "summary": about["Summary"] or "",
            "requires": tuple(about.get_all("Requires-Dist") or ()),
            "extras": tuple(about.get_all("Provides-Extra") or ()),
        }
    except Exception as error:
        name, _, version = Path(str(getattr(distribution, "_path", "unknown"))).stem.partition("-")
        problem = f"its metadata cannot be read: {cause(error.with_traceback(None))}"
        return {"distribution": canonicalize_name(name), "version": version or "?", "problem": problem}


def entries(group: str) -> list[Entry]:
    """Return the entry points of a group, sorted by name. Imports nothing and never raises.

    Where several distributions use one name, ``quest-<name>`` comes first, then the others in alphabetical order.
    """
    found: dict[str, list[Entry]] = {}
    for distribution in importlib.metadata.distributions():
        points = []
        with contextlib.suppress(Exception):  # of an unreadable entry_points.txt, which stops `import torch` itself
            points = [point for point in distribution.entry_points if point.group == group]
        if points:
            about = facts(distribution)
            added = [Entry(group, point.name, point.value, **about) for point in points]
            found.setdefault(canonicalize_name(about["distribution"]), added)  # the first on sys.path is imported
    return sorted(
        (entry for entries in found.values() for entry in entries),
        key=lambda e: (e.name, e.distribution != f"quest-{e.name}", canonicalize_name(e.distribution)),
    )


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """Run code of another distribution.

    Its prints go to standard error. If it is slow, one line on standard error names it. Ctrl-C and other signals act as
    always.

    Args:
        what: the module and its distribution, for that line.

    Raises:
        PluginError: the code raised anything, SystemExit and KeyboardInterrupt included; the message is the cause.
    """
    with ONE_AT_A_TIME, _signals() as received, contextlib.redirect_stdout(sys.stderr), named_if_slow(what):
        try:
            yield
        except BaseException as error:
            if received:  # the handler of a signal raised it, not the package
                raise
            raise PluginError(cause(error)) from error
    if signal.SIGINT in received and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise KeyboardInterrupt  # the package swallowed it


@contextlib.contextmanager
def named_if_slow(what: str) -> Iterator[None]:
    """Name the import of `what` on standard error if the block takes longer than SLOW_S."""
    named = threading.Timer(SLOW_S, lambda: print(f"quest: waiting for the import of {what}", file=sys.stderr))
    named.daemon = True
    named.start()
    try:
        yield
    finally:
        named.cancel()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Give the list of the signals that arrive in this block. Their handlers run as always."""
    received: list[int] = []
    replaced = {}
    if threading.current_thread() is threading.main_thread():  # no other thread receives signals
        for number in (getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)):
            handler = signal.getsignal(number)
            if callable(handler):

                def note(number: int, frame: Any, handler: Any = handler) -> Any:
                    received.append(number)
                    return handler(number, frame)

                signal.signal(number, note)
                replaced[number] = (handler, note)
    try:
        yield received
    finally:
        for number, (handler, note) in replaced.items():
            if signal.getsignal(number) is note:  # else the package has set its own
                signal.signal(number, handler)


def cause(error: BaseException) -> str:
    """Return an error in one line, with the last place outside of quest_core that it came from."""
    if isinstance(error, SystemExit):
        text = f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        try:
            lines = str(error).strip().splitlines()
        except BaseException:  # the error is of a class of the package
            lines = []
        text = f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((HERE, "<")) and "importlib" not in frame.filename
    ]
    return f"{text} ({places[-1]})" if places else text
