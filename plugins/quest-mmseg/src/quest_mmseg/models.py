"""mmseg's classes with the further arguments `attention`, `attention_from` and `allow_partial`.

>>> model = dict(type="quest_mmseg.EncoderDecoder", attention="quest", ...)
>>> backbone = dict(type="quest_mmseg.VisionTransformer", attention="quest", ...)

All other arguments and the names of the parameters are mmseg's.
"""

from __future__ import annotations

from typing import Any

from mmseg.models import backbones, decode_heads, segmentors

from quest_core.errors import InjectionError
from quest_core.hosts.adapter import HostAttention
from quest_core.hosts.inject import KEYS, Request
from quest_core.hosts.plugins import running_adapters
from quest_core.projections import init_norms

from .adapter import MmsegAdapter
from .keys import MODELS_WITH_ATTENTION, check, read
from .registry import MODELS


class Accepts:
    """Builds mmseg's model, then replaces its attention. Every argument is checked before anything is built.

    Args:
        attention: the mechanism for every attention module: a name, a text such as ``"quest+gqa(kv_heads=1)"`` or a
            mapping with `name` and options. None if parts of the model have their own.
        attention_from: the attention of the checkpoints to load, if it is another on purpose.
        allow_partial: go on if the model has other attention modules, which cannot be replaced.

    Raises:
        ConfigError: an attention is misspelt, missing, named twice, or named where it is not read.
        InjectionError: attention modules would stay as they are, and `allow_partial` is False.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        request = read(options, type(self))
        options = {key: value for key, value in options.items() if key not in KEYS}
        super().__init__(*arguments, **options)
        if request is not None:
            _apply(request, self)

    def init_weights(self) -> None:
        """Initialize as mmseg does, and then set the initial norms that the attention asks for.

        Projections that mmseg has loaded (``init_cfg=dict(type="Pretrained")``) are not changed. Heads of mmdetection
        draw every parameter of their decoder; those of a mechanism keep their values.
        """
        parts = [part for part in self.modules() if isinstance(part, HostAttention)]  # type: ignore[attr-defined]
        kept = [[own.detach().clone() for own in part.mechanism.parameters()] for part in parts]
        loaded: set[HostAttention] = set()
        hooks = [part.register_load_state_dict_pre_hook(lambda part, *_: loaded.add(part)) for part in parts]
        super().init_weights()  # type: ignore[misc]
        for part, values, hook in zip(parts, kept, hooks, strict=True):
            hook.remove()
            if part not in loaded:
                init_norms(part)
                for own, value in zip(part.mechanism.parameters(), values, strict=True):
                    own.data.copy_(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "cfg":  # mmseg's `init_model` sets the whole Config
            check(value, self)
        super().__setattr__(name, value)


def _apply(request: Request, model: Any) -> None:
    """Inject into a model; a backbone of timm is replaced by quest-timm, if that is installed."""
    timm = [adapter for adapter in running_adapters() if adapter.name == "timm"]
    kinds = {type(part).__module__.partition(".")[0] for part in model.modules()}
    trained = any(type(part).__name__ == "TIMMBackbone" and part._is_init for part in model.modules())
    try:
        request.apply(model, [MmsegAdapter(), *timm], fresh=not trained)
    except InjectionError as error:
        if timm or "timm" not in kinds:
            raise
        raise InjectionError(
            f"{error}. The backbone is one of timm, whose attention quest-timm replaces: pip install 'quest-timm[host]'"
        ) from None


def _accepting(name: str, home: Any) -> type[Any] | None:
    host = getattr(home, name, None)
    if host is None:
        return None
    made = type(name, (Accepts, host), {"__module__": __name__, "__doc__": f"mmseg's {name}, which accepts attention."})
    MODELS.register_module(module=made)
    return made


for _kind, _home in (("segmentors", segmentors), ("backbones", backbones), ("heads", decode_heads)):
    for _name in MODELS_WITH_ATTENTION[_kind]:
        globals()[_name] = _accepting(_name, _home)
