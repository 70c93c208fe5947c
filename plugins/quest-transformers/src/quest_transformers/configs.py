"""What a config of transformers says of its attention, as text in ``attn_implementation``.

transformers writes this attribute into config.json and hands it to the model that is built from the config. Without
this plugin, transformers refuses the name there. While a model exists, its ``config._attn_implementation`` is one of
`NAMES`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn

from quest_core.config import STANDARD, AttentionConfig
from quest_core.drafts import draft
from quest_core.errors import ConfigError, one_of
from quest_core.hosts.patching import Patches

from .anatomy import is_attention, role
from .choice import ROLES, Choice
from .layers import INTERFACE, NAMES, WHOLE_MASKS, prepares

KEY = "attn_implementation"
"""The attribute of a config that holds the attention as text, and its key in config.json."""


def install(patches: Patches) -> None:
    """Let configs accept and keep an attention."""
    from transformers.configuration_utils import PreTrainedConfig

    patches.wrap(PreTrainedConfig, "_attn_implementation", _implementation)
    patches.put(PreTrainedConfig, "attention", property(attention_of, _set_attention))
    patches.put(PreTrainedConfig, KEY, property(attention_of, _set_implementation))


def _implementation(stock: property) -> property:
    """Wrap the property that holds a config's attention function: an attention of quest is kept as text."""

    def set_implementation(self: Any, value: Any) -> None:
        value = as_text(self, value)
        assert stock.fset is not None
        stock.fset(self, value)
        own = self._attn_implementation_internal
        choice = parse(own)
        if choice is not None:
            self.__dict__[KEY] = str(choice)
            self._attn_implementation_internal = INTERFACE  # until a model is built, which chooses
        elif own is not None and own not in NAMES and not _is_constructing(sys._getframe(1)):
            self.__dict__.pop(KEY, None)

    return property(stock.fget, set_implementation)


def _is_constructing(frame: FrameType) -> bool:
    """Return whether a frame is of a model's constructor, as that of SAM, which copies its function to its parts."""
    from transformers.modeling_utils import PreTrainedModel

    while "setattr" in frame.f_code.co_name and frame.f_back is not None:  # of the config
        frame = frame.f_back
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel)


def as_text(config: Any, value: Any) -> Any:
    """A mapping of an attention's options or of roles as text; others, such as one of a config's parts, as they are.

    Raises:
        ConfigError: it is neither text nor a mapping, or a mapping that is not understood.
    """
    understood = value is None or isinstance(value, str | Mapping)
    if not understood:
        return str(AttentionConfig.parse(value))
    parts = {"", *config.sub_configs}
    unknown = sorted({*value} - parts, key=str) if isinstance(value, Mapping) else []
    if {"name", *ROLES}.intersection(unknown):
        return str(Choice.parse(value))
    if any(parse(value[key]) for key in unknown):  # transformers ignores the key
        choices = sorted({*parts, *ROLES, "name"} - {""})
        raise ConfigError(
            f"{KEY}: {unknown[0]!r} is not a part of {type(config).__name__}; {one_of(unknown[0], choices)}"
        )
    return value


def parse(text: Any) -> Choice | None:
    """The choice that a text means; None for the names of transformers' own functions and for unknown ones."""
    try:
        return Choice.parse(text) if isinstance(text, str) and text not in NAMES else None
    except ConfigError:
        return None


def attention_of(config: Any) -> str | None:
    """The attention as text; None where it is the host's own."""
    return config.__dict__.get(KEY)


def _set_implementation(config: Any, value: Any) -> None:
    config._attn_implementation = value  # from_pretrained sets the keys of config.json that it is given


def _set_attention(config: Any, attention: Any) -> None:
    config._attn_implementation = None if attention is None else str(Choice.parse(attention))
    if attention is None:
        config.__dict__.pop(KEY, None)


def choice_of(config: Any) -> Choice | None:
    """Return what a config asks for."""
    text = attention_of(config)
    return None if text is None else Choice.parse(text)


def choice_for(model: Any, module: Any) -> Choice | None:
    """Return what the configs of a model ask for one of its attention modules.

    The config of the model decides if it does not hold the module's, which a constructor has made then.
    """
    held = {type(part) for part in parts_of(model.config)}
    return choice_of(module.config) or (None if type(module.config) in held else choice_of(model.config))


def write_configs(model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
    """Make every config of a model say the attention that its modules will have.

    A config may belong to another model too, so a copy takes its place where it has to change. See `Adapter.connect`.
    """
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    wanted: dict[int, tuple[Any, str | None, str]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            parts = [drafts.get(part, part) for part in module.modules()]
            found: list[Any] = [part for part in parts if is_attention(part) or hasattr(part, "mechanism")]
            if not found or not all(hasattr(part, "mechanism") for part in found):
                continue  # parts of it have configs of their own
            choice = choice_of(module.config)
            if not (choice and all(choice.of(role(part)) == part.mechanism.config for part in found)):
                text = _summary(found)
                name = interface_of(module, Choice.parse(text)) if text else INTERFACE
                wanted[id(module.config)] = (module.config, text, name)
    memo: dict[int, Any] = {}
    held = [value for module in model.modules() for value in vars(module).values()]
    for config in held:
        if isinstance(config, PreTrainedConfig) and any(id(part) in wanted for part in parts_of(config)):
            copy.deepcopy(config, memo)
    for config, text, interface in wanted.values():
        new = memo[id(config)]
        new.__dict__.pop(KEY, None)
        if text is not None:
            new.__dict__[KEY], new._attn_implementation_internal = text, interface
    for module in model.modules():
        configs = {name: value for name, value in vars(module).items() if isinstance(value, PreTrainedConfig)}
        if module in drafts or not memo.keys().isdisjoint(map(id, configs.values())):
            made = drafts.setdefault(module, draft(module))  # has the config from before the first injection
            for name, value in configs.items():
                setattr(made, name, memo.get(id(value), value))


def forget(model: nn.Module) -> None:
    """Make every config of a model that has the host's own attention again say so, in copies of those that do not."""
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    memo: dict[int, Any] = {}
    modules = [*model.modules()]
    for module in modules:
        for config in vars(module).values():
            if isinstance(config, PreTrainedConfig) and any(map(attention_of, parts_of(config))):
                copy.deepcopy(config, memo)
    for module in reversed(modules):  # the innermost model of a config says which functions it has
        new = memo.get(id(module.config)) if isinstance(module, PreTrainedModel) else None
        for part in () if new is None else parts_of(new):
            part.__dict__.pop(KEY, None)
            if part._attn_implementation_internal in NAMES:
                part._attn_implementation_internal = interface_of(module, Choice.parse(STANDARD))
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = memo.get(id(value), value)


def parts_of(config: Any) -> Iterator[Any]:
    """A config and those that it holds."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from parts_of(part)


def interface_of(model: Any, choice: Choice) -> str:
    """Return the name of the function that a model's config names: the host's own, or ours if it takes its place."""
    if all(prepares(choice.of(role)) for role in ROLES) or not model._can_set_attn_implementation():
        now = model.config._attn_implementation_internal
        return ("sdpa" if model._supports_sdpa else "eager") if now in (None, *NAMES) else now
    return INTERFACE if model._supports_sdpa else WHOLE_MASKS


def _summary(modules: list[Any]) -> str | None:
    """The text that says the attention of all modules; None where none can."""
    configs: dict[str, set[AttentionConfig]] = {}
    for module in modules:
        configs.setdefault(role(module), set()).add(module.mechanism.config)
    if any(len(found) > 1 for found in configs.values()):
        return None
    chosen = {role: next(iter(found)) for role, found in configs.items()}
    if len(set(chosen.values())) == 1:
        return str(next(iter(chosen.values())))
    return str(Choice(**{role: chosen.get(role, STANDARD) for role in ROLES}))
