"""The classes that a config names: mmseg's own, with one more argument.

>>> model = dict(type="quest_mmseg.EncoderDecoder", attention="quest", ...)
>>> backbone = dict(type="quest_mmseg.VisionTransformer", attention="quest", ...)

Every other argument, the parameters' names and the checkpoints are the host's.
"""

from __future__ import annotations

from typing import Any

from mmseg.models import backbones, decode_heads, segmentors

from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError
from quest_core.hosts.injection import REPORT, inject

from .adapter import MmsegAdapter
from .info import INFO
from .registry import MODELS


class Accepts:
    """Builds the host's model, then replaces the attention in it.

    Args:
        attention: the mechanism for every attention module: a name, a text such as ``"quest+gqa(kv_heads=1)"`` or a
            mapping with `name` and options. None leaves the attention to the parts.
    """

    def __init__(self, *arguments: Any, attention: AttentionSpec | None = None, **options: Any) -> None:
        # A misspelt name is refused before the model is built.
        config = None if attention is None else AttentionConfig.parse(attention)
        super().__init__(*arguments, **options)
        if config is None:
            return
        parts: Any = self
        for path, module in parts.named_modules():
            if path and hasattr(module, REPORT):
                raise ConfigError(
                    f"attention is named twice: '{config}' for {type(self).__name__} and "
                    f"'{getattr(module, REPORT).attention}' for its {path}; keep one of them"
                )
        _, report = inject(parts, config, adapter=MmsegAdapter(), fresh=True)
        report.announce()


def _accepting(name: str, home: Any) -> type[Any] | None:
    host = getattr(home, name, None)
    if host is None:
        return None
    made = type(name, (Accepts, host), {"__module__": __name__, "__doc__": f"mmseg's {name}, which accepts attention."})
    MODELS.register_module(module=made)
    return made


for _kind, _home in (("segmentors", segmentors), ("backbones", backbones), ("heads", decode_heads)):
    for _name in INFO["models"][_kind]:
        globals()[_name] = _accepting(_name, _home)
