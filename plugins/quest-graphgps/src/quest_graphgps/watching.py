"""The key `gnn.watch_attention`: the logs of GraphGym and GraphGPS hold each epoch's largest logit and entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from quest_core import Watch
from quest_core.errors import ConfigError
from quest_core.hosts.patching import Patches

KEY = "watch_attention"
_current: list[Watch] = []  # of the model that was built last; GraphGym trains one after the other


def install(patches: Patches) -> None:
    """Let the loggers of both hosts take what was measured."""
    for logger in ("torch_geometric.graphgym.logger:Logger", "graphgps.logger:CustomLogger"):
        patches.around(logger, "update_stats", _add)


def every(cfg: Any) -> int:
    """Return the number of batches from one measurement to the next, 0 for none; raise ConfigError for other values."""
    found = cfg.gnn.get(KEY) or 0
    if type(found) is not int or found < 0:
        raise ConfigError(f"gnn.{KEY} is {found!r}; measure every n-th batch with a whole number, or none with 0")
    return found


def begin(model: nn.Module, cfg: Any) -> None:
    """Watch a model that was built from a config, if the config says so; InjectionError if it has no attention."""
    _current.clear()
    if every(cfg):
        _current.append(Watch(model, every=every(cfg)))


def _add(update: Callable[..., None], logger: Any, *arguments: Any, **stats: Any) -> None:
    """Add the latest measurement to the numbers of a batch, whose mean over an epoch is logged."""
    if _current and logger.name == "train":
        _current[0].step()
        stats |= _current[0].totals()
    update(logger, *arguments, **stats)
