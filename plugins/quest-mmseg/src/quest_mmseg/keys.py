"""Which `attention` in an mmengine config is read. Any other one is an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError
from quest_core.hosts.adapter import sections
from quest_core.hosts.inject import REPORT, Request

from .registry import MODELS

MODELS_WITH_ATTENTION = {
    "segmentors": ["EncoderDecoder", "CascadeEncoderDecoder", "DepthEstimator", "MultimodalEncoderDecoder"],
    "backbones": ["VisionTransformer", "BEiT", "MAE", "MixVisionTransformer", "SwinTransformer", "PCPVT"],
    "heads": [
        "SegmenterMaskTransformerHead",
        "KernelUpdateHead",
        "Mask2FormerHead",
        "MaskFormerHead",
        "SideAdapterCLIPHead",
    ],
}
"""Classes of mmseg whose attention is replaced, each registered as quest_mmseg.<name>."""

TYPES = frozenset(name for names in MODELS_WITH_ATTENTION.values() for name in names)
"""mmseg's classes that this plugin offers with `attention`."""


def offered(config: Any, at: str = "") -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield the path, the mapping and the class of every part of a model's config whose type is of this plugin.

    Args:
        at: path of `config`.

    Raises:
        ConfigError: a class of mmseg itself is given an attention. Some of them ignore unknown keys.
    """
    for path, part in sections(config, at):
        kind = part.get("type") or ""
        home, _, name = (kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}").rpartition(".")
        package = home.partition(".")[0]
        if package == "quest_mmseg" and name in TYPES:
            yield path, part, name
        elif package in ("", "mmseg") and name in TYPES and part.get("attention") is not None:
            raise ConfigError(
                f"{path}.attention is '{part['attention']}', and mmseg's {name} does not read it; write "
                f"{path}.type='quest_mmseg.{name}' too (--cfg-options {path}.type=quest_mmseg.{name})"
            )


def read(options: Mapping[str, Any], kind: Any) -> Request | None:
    """Return what the options of a class of this plugin ask for, or None if parts of it have their own attention.

    Raises:
        ConfigError: an attention is misspelt, missing, named twice, or named where it is not read.
    """
    name = f"quest_mmseg.{kind.__name__}"
    known = {key for base in kind.__mro__ for key in inspect.signature(base.__init__).parameters}
    request = Request.read(options, name, options.keys() - known - {"type"})
    inner = [(path, part.get("attention")) for path, part, _ in offered(options) if path]
    parts = [(path, AttentionConfig.parse(own)) for path, own in inner if own is not None]
    if request is None and not parts:
        raise ConfigError(
            f"'{name}' has no attention; write dict(type='{name}', attention='quest', ...), or --cfg-options "
            f"model.attention=quest; mmseg's own attention is type='{kind.__name__}' or attention='standard'"
        )
    if request is not None and parts:
        path, own = parts[0]
        raise ConfigError(
            f"attention is named twice: '{request.attention}' for {name} and '{own}' for its {path}; keep one"
        )
    return request


def check(config: Any, model: Any) -> None:
    """Raise ConfigError if a config asks for an attention wrongly, or for one that the model does not have.

    A variable of a config file is a key at its top level, which mmengine does not read: ``attention`` there is valid
    only if the model has that attention.

    Args:
        config: mmengine's Config of a run or of `init_model`.
        model: a model, or its config.
    """
    given, built = config.get("attention"), set()
    for part in (config.get("model"), model):
        for _, options, name in offered(part, "model"):
            request = read(options, MODELS.get(name))
            built |= {str(request.attention)} if request else set()
    if given is None:
        return
    wanted = AttentionConfig.parse(given)
    if isinstance(model, nn.Module):
        built = {getattr(module, REPORT).attention for module in model.modules() if hasattr(module, REPORT)}
    if not any(wanted.means(attention) for attention in built):
        has = f"attention '{', '.join(sorted(built))}'" if built else "mmseg's own attention"
        raise ConfigError(
            f"attention is '{wanted}' at the top level of the config, where nothing reads it; the model has {has}; "
            f"write model.attention='{wanted}' (--cfg-options model.attention=...) with a type of quest_mmseg"
        )
