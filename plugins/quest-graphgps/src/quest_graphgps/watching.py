"""The keys `gnn.watch_attention`, by which the logs hold what attention does in each epoch, and `gnn.qk_clip`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from quest_core import Watch
from quest_core.errors import ConfigError
from quest_core.hosts.patching import Patches

KEYS = {"watch_attention": "measurement", "qk_clip": "clipping"}
"""Key of `gnn` -> what 0 turns off."""
_current: list[Watch] = []  # of the model that was built last; GraphGym trains one after the other


def install(patches: Patches) -> None:
    """Let the loggers of both hosts take what was measured."""
    for logger in ("torch_geometric.graphgym.logger:Logger", "graphgps.logger:CustomLogger"):
        patches.around(logger, "update_stats", _add)


def read(cfg: Any) -> tuple[int, int]:
    """Return the batches from one measurement to the next, and the threshold of QK-clip; 0 for none."""
    every, clip = (cfg.gnn.get(key) or 0 for key in KEYS)
    for (key, what), found in zip(KEYS.items(), (every, clip), strict=True):
        if type(found) is not int or found < 0:
            raise ConfigError(f"gnn.{key} is {found!r}; expected a whole number, 0 for no {what}")
    return every, clip


def begin(model: nn.Module, cfg: Any) -> None:
    """Watch a model that was built from a config, if the config says so; InjectionError if it has no attention."""
    _current.clear()
    every, clip = read(cfg)
    if every or clip:
        _current.append(Watch(model, every=every or 100, clip=clip or None))


def _add(update: Callable[..., None], logger: Any, *arguments: Any, **stats: Any) -> None:
    """Add the latest measurement to the numbers of a batch, whose mean over an epoch is logged."""
    if _current and logger.name == "train":
        _current[0].step()
        stats |= _current[0].latest
    update(logger, *arguments, **stats)
