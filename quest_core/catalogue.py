"""Every mechanism by name, in-tree and installed."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

from . import mechanisms
from .errors import ConfigError, PluginError
from .mechanisms.part import Part


@functools.cache
def parts() -> Mapping[str, Part]:
    """Every mechanism by name: those of quest_core and those that installed packages add under `quest.attention`."""
    found = {part.name: part for part in mechanisms.PARTS}
    for entry in sorted(importlib.metadata.entry_points(group="quest.attention"), key=lambda e: e.name):
        owner = entry.dist.name if entry.dist else "an unknown distribution"
        try:
            extra = entry.load()
        except Exception as error:
            raise PluginError(
                f"mechanisms '{entry.name}' of {owner} fail to import: {error!r}; fix or remove it: "
                f"pip uninstall {owner}"
            ) from error
        for part in extra:
            if part.name in found:
                raise ConfigError(f"mechanism '{part.name}' of {owner} exists already")
            found[part.name] = part
    return found


def available() -> list[str]:
    """The names that `attention=` understands: scores and families alone, normalisers and groupings after a '+'."""
    return sorted(parts())
