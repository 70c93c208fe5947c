"""What a config of transformers says of its attention, as text in ``attn_implementation``.

transformers writes this attribute into config.json and hands it to the model that is built from the config. Without
this plugin, transformers refuses the name there. While a model exists, its ``config._attn_implementation`` is one of
`OUR_FUNCTIONS`.
"""

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
from .layers import OUR_FUNCTION, OUR_FUNCTION_WHOLE_MASKS, OUR_FUNCTIONS, prepares

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
            self._attn_implementation_internal = OUR_FUNCTION  # until a model is built, which chooses
        elif own is not None and own not in OUR_FUNCTIONS and not _is_constructing(sys._getframe(1)):
            self.__dict__.pop(KEY, None)

    return property(stock.fget, set_implementation)


def _is_constructing(frame: FrameType) -> bool:
    """Return whether a frame is of a model's constructor, as that of SAM, which copies its function to its parts."""
    from transformers.modeling_utils import PreTrainedModel

    while "setattr" in frame.f_code.co_name and frame.f_back is not None:  # of the config
        frame = frame.f_back
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel)


def as_text(config: Any, value: Any) -> Any:
    """Return a mapping of an attention's options or of roles as text; others, such as of a config's parts, as they are.

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
    """Return the choice that a text means, or None for names of transformers' own functions and unknown ones."""
    try:
        return Choice.parse(text) if isinstance(text, str) and text not in OUR_FUNCTIONS else None
    except ConfigError:
        return None


def attention_of(config: Any) -> str | None:
    """Return the attention of a config as text, or None if it is the host's own."""
    return config.__dict__.get(KEY)


def _set_implementation(config: Any, value: Any) -> None:
    config._attn_implementation = value  # from_pretrained sets the keys of config.json that it is given


def _set_attention(config: Any, attention: Any) -> None:
    config._attn_implementation = None if attention is None else str(Choice.parse(attention))
    if attention is None:
        config.__dict__.pop(KEY, None)


def choice_of(config: Any) -> Choice | None:
    """Return `attention_of` a config, parsed."""
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

    wanted: dict[int, tuple[Any, str | None]] = {}  # id of a config that changes -> its model, its text
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            parts = [drafts.get(part, part) for part in module.modules()]
            found: list[Any] = [part for part in parts if is_attention(part) or hasattr(part, "mechanism")]
            if not found or not all(hasattr(part, "mechanism") for part in found):
                continue  # parts of it have configs of their own
            choice = choice_of(module.config)
            if not (choice and all(choice.of(role(part)) == part.mechanism.config for part in found)):
                wanted[id(module.config)] = (module, _summary(found))
    memo: dict[int, Any] = {}  # id of a config -> its copy, as deepcopy keeps it: what configs share stays shared
    held = [value for module in model.modules() for value in vars(module).values()]
    for config in held:
        if isinstance(config, PreTrainedConfig) and any(id(part) in wanted for part in parts_of(config)):
            copy.deepcopy(config, memo)
    for holder, text in wanted.values():
        new = memo[id(holder.config)]
        new.__dict__.pop(KEY, None)
        if text is not None:
            new.__dict__[KEY] = text
            new._attn_implementation_internal = function_for(holder, Choice.parse(text))
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

    memo: dict[int, Any] = {}  # as in `write_configs`
    modules = [*model.modules()]
    for module in modules:
        for config in vars(module).values():
            if isinstance(config, PreTrainedConfig) and any(map(attention_of, parts_of(config))):
                copy.deepcopy(config, memo)
    for module in reversed(modules):  # the innermost model of a config says which functions it has
        new = memo.get(id(module.config)) if isinstance(module, PreTrainedModel) else None
        for part in () if new is None else parts_of(new):
            part.__dict__.pop(KEY, None)
            if part._attn_implementation_internal in OUR_FUNCTIONS:
                part._attn_implementation_internal = function_for(module, Choice.parse(STANDARD))
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = memo.get(id(value), value)


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a config and those that it holds."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from parts_of(part)


def function_for(model: Any, choice: Choice) -> str:
    """Return the name of the attention function for a model's config: the host's, or ours if it takes its place."""
    if all(prepares(choice.of(role)) for role in ROLES) or not model._can_set_attn_implementation():
        now = model.config._attn_implementation_internal
        return ("sdpa" if model._supports_sdpa else "eager") if now in (None, *OUR_FUNCTIONS) else now
    return OUR_FUNCTION if model._supports_sdpa else OUR_FUNCTION_WHOLE_MASKS


def _summary(modules: list[Any]) -> str | None:
    """Return the text of a choice that gives every module the attention that it has, or None if there is none."""
    configs: dict[str, set[AttentionConfig]] = {}
    for module in modules:
        configs.setdefault(role(module), set()).add(module.mechanism.config)
    if any(len(found) > 1 for found in configs.values()):
        return None
    chosen = {role: next(iter(found)) for role, found in configs.items()}
    if len(set(chosen.values())) == 1:
        return str(next(iter(chosen.values())))
    return str(Choice(**{role: chosen.get(role, STANDARD) for role in ROLES}))
