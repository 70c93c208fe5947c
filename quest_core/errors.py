"""Every error the library raises on purpose: each says what was found, what is allowed and how to fix it."""

import difflib
import operator
from collections.abc import Iterable


class QuestError(Exception):
    """Base of all errors raised by quest_core and its plugins."""


class ConfigError(QuestError, ValueError):
    """A configuration names something that does not exist or has a value that is not allowed."""


class InputError(QuestError, ValueError):
    """An argument of a call does not fit: a tensor's shape, type or device, a cache, a batch."""


class UnsupportedError(QuestError):
    """A mechanism cannot be honored here; the message says why, and what to do instead."""


class InjectionError(QuestError):
    """A model has no attention that an adapter could replace, or a replacement went wrong."""


class CheckpointError(QuestError):
    """A checkpoint was trained with another attention than the model has."""


class PluginError(QuestError):
    """A plugin was asked for that is missing, broken, unsupported, incompatible or duplicated."""


def one_of(found: object, choices: Iterable[str]) -> str:
    """Return the tail of an error message: the nearest spelling if one is close, then the valid choices.

    >>> one_of("qest", ["quest", "standard"])
    "did you mean 'quest'? Choose from: quest, standard"
    """
    names, given = sorted(choices), str(found).lower()
    text = "hoose from: " + (", ".join(names) if names else "(nothing is available)")
    alike = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given, alike, n=1, cutoff=0.6)
    near = near or [name for name in alike if len(given) > 2 and (given in name or f"-{name}" in given)]
    return f"did you mean '{alike[near[0]]}'? C{text}" if near else f"c{text}"


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError, naming the size, unless all are whole numbers of at least 1, or None."""
    for name, value in sizes.items():
        if value is not None and not (hasattr(value, "__index__") and operator.index(value) > 0):
            raise ConfigError(f"{name} is {value!r}; it is a whole number of at least 1")


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError if a flag is not a bool; a text is true in Python."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; write True or False")
