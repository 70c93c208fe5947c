"""Which `attention` in an mmengine config is read. Any other one is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError
from quest_core.hosts.injection import REPORT

from .info import INFO

TYPES = frozenset(name for names in INFO["models"].values() for name in names)
"""mmseg's classes that this plugin offers with `attention`."""


def entries(config: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the mapping of every part of a model's config that is of this plugin and names an attention.

    Raises:
        ConfigError: a class of mmseg itself is given one. Some of them ignore unknown keys.
    """
    if isinstance(config, Mapping):
        if config.get("attention") is not None:
            kind = config.get("type") or ""
            home, _, name = (kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}").rpartition(".")
            package = home.partition(".")[0]
            if package == "quest_mmseg":
                yield path, config
            elif package in ("", "mmseg") and name in TYPES:
                raise ConfigError(
                    f"{path}.attention is '{config['attention']}', and mmseg's {name} does not read it; write "
                    f"{path}.type='quest_mmseg.{name}'"
                )
        for key, value in config.items():
            yield from entries(value, f"{path}.{key}" if path else key)
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from entries(value, f"{path}.{index}")


def refuse_unread(config: Any, model: nn.Module) -> None:
    """Raise ConfigError if a config names an attention that `model` was not built with.

    A variable of a config file is a key at its top level, which mmengine does not read: ``attention`` there is valid
    only if the model has that attention.

    Args:
        config: mmengine's Config of a run or of `init_model`.
        model: as built from it.
    """
    list(entries(config.get("model"), "model"))  # raises
    given = config.get("attention")
    if given is None:
        return
    wanted = AttentionConfig.parse(given)
    built = {getattr(module, REPORT).attention for module in model.modules() if hasattr(module, REPORT)}
    if not any(wanted.means(attention) for attention in built):
        has = f"attention '{', '.join(sorted(built))}'" if built else "mmseg's own attention"
        raise ConfigError(
            f"attention is '{wanted}' at the top level of the config, where nothing reads it; the model has {has}; "
            f"write model.attention='{wanted}' (--cfg-options model.attention=...) with a type of quest_mmseg"
        )
