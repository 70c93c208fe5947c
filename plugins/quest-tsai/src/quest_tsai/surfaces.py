"""Wrappers of tsai's classes and functions, which read `attention` and compare it with a checkpoint's.

`TsaiAdapter.install` puts them in place.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quest_core.catalogue import parts
from quest_core.checkpoints import ENTRY, read
from quest_core.config import AttentionConfig
from quest_core.errors import CheckpointError, ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.injection import inject
from quest_core.hosts.torch import MultiheadAttention as TorchAttention
from quest_core.hosts.torch import TorchAdapter

from .info import INFO
from .layers import Replacement

OPTIONS = ("attention", "attention_from", "allow_partial")
"""The options that the plugin adds to an architecture."""


class Choice(NamedTuple):
    """The plugin's options of an architecture, checked; see `quest_core.inject`."""

    attention: AttentionConfig
    attention_from: AttentionConfig | None
    allow_partial: bool


def choose(architecture: Any, options: Mapping[str, Any]) -> Choice | None:
    """Return what `options` say about attention, or None if they say nothing.

    Args:
        architecture: a class or function that builds a model, or a model.
        options: all that the user has given to the architecture by keyword.

    Raises:
        ConfigError: a misspelt or misplaced option, or an unknown mechanism.
        UnsupportedError: the architecture has no attention that could be replaced.
    """
    built = isinstance(architecture, nn.Module)
    name = type(architecture).__name__ if built else getattr(architecture, "__name__", repr(architecture))
    known = set() if built else inspect.signature(architecture).parameters.keys()
    if "attention" in known:  # a user's own architecture, which reads it itself
        return None
    unknown = options.keys() - known - {*OPTIONS}
    for option in unknown:  # many architectures swallow options that they do not know
        near = difflib.get_close_matches(option, OPTIONS, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"{name} has no option {option!r}; did you mean {near[0]!r}?")
    attention = options.get("attention")
    if attention is None:
        for option in OPTIONS[1:]:
            if options.get(option):
                raise ConfigError(
                    f"{name}: {option}={options[option]!r} is given without attention; add attention=... too "
                    "(attention='standard' for tsai's own)"
                )
        return None
    config = AttentionConfig.parse(attention)
    trained = options.get("attention_from")
    choice = Choice(
        config, None if trained is None else AttentionConfig.parse(trained), bool(options.get("allow_partial"))
    )
    misplaced = unknown & {option.name for part in parts().values() for option in part.options}
    if misplaced:
        inner = {"name": str(config), **{option: options[option] for option in sorted(misplaced)}}
        raise ConfigError(f"{name} has no option {min(misplaced)!r}; write attention={inner!r}")
    if built:
        raise ConfigError(
            f"attention={attention!r} cannot change {name}, a model that is built already; give attention to the class "
            f"of the model, or call quest_core.inject(model, {attention!r}) before the learner is made"
        )
    kinds = {kind.__name__ for kind in getattr(architecture, "__mro__", ())}
    if getattr(architecture, "__module__", "").startswith("tsai.") and not kinds & {*INFO["architectures"]}:
        raise UnsupportedError(
            f"attention={attention!r} cannot be used in {name}: it has no attention that could be replaced. "
            f"Architectures of tsai that take it: {', '.join(INFO['architectures'])}"
        )
    return choice


def accept(architecture: type[Any], adapter: Adapter) -> Callable[[Any], Any]:
    """Return a wrapper of `architecture.__init__` that builds the stock model, then injects."""

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def __init__(self: Any, *arguments: Any, **options: Any) -> None:
            choice = choose(architecture, options)
            stock(self, *arguments, **{name: value for name, value in options.items() if name not in OPTIONS})
            if choice is None:
                return
            owner = adapter if any(True for _ in adapter.sites(self)) else TorchAdapter()
            _, report = inject(self, adapter=owner, fresh=True, **choice._asdict())
            report.announce()

        return __init__

    return make


def read_early(stock: Any) -> Any:
    """Wrap a function or `__init__` that makes a learner: refuse what cannot be before the data is prepared."""
    names = stock.__code__.co_varnames[: stock.__code__.co_argcount]
    passes_on = bool(stock.__code__.co_flags & inspect.CO_VARKEYWORDS)

    @functools.wraps(stock)
    def learner(*arguments: Any, **options: Any) -> Any:
        from tsai.learner import get_arch
        from tsai.models.utils import build_ts_model

        given = {**dict(zip(names, arguments, strict=False)), **options}
        others = options.keys() - {*names} - inspect.signature(build_ts_model).parameters.keys()
        for option in () if passes_on else sorted(others & {*OPTIONS}):
            raise ConfigError(
                f"{option!r} is an option of the architecture; write arch_config={{{option!r}: {options[option]!r}}}"
            )
        asked = {**{option: options[option] for option in others}, **(given.get("arch_config") or {})}
        arch = given.get("arch")
        choice = choose(get_arch("InceptionTimePlus" if arch is None else arch), asked)
        made = stock(*arguments, **options)
        model = (arguments[0] if made is None else made).model
        if choice is not None and not any(hasattr(module, ENTRY) for module in model.modules()):
            raise InjectionError(
                f"attention='{choice.attention}' was given to {arch!r}, which did not read it; pass it on to an "
                "architecture of tsai, or call quest_core.inject(model, ...) before the learner is made"
            )
        return made

    return learner


def refuse_unread(model: nn.Module, state_dict: Mapping[str, Any], *_: Any) -> None:
    """Raise CheckpointError if `state_dict` names an attention for a module of `model` that has the host's own."""
    modules = dict(model.named_modules())
    for key, spelled in state_dict.items():
        owner = key.removesuffix(f".{ENTRY}")
        if owner != key and not hasattr(modules.get(owner), ENTRY):
            trained = read(spelled)
            raise CheckpointError(
                f"'{key}': this checkpoint was trained with attention '{trained}', and the model has tsai's own; build "
                f"it with attention='{trained}', or with attention='standard' and attention_from='{trained}' if you "
                "mean to go on from these weights with standard attention"
            )


def check_load(stock: Any) -> Any:
    """Wrap `Learner.load`, which with strict=False ignores the key that names the attention."""

    @functools.wraps(stock)
    def load(self: Any, *arguments: Any, **options: Any) -> Any:
        from fastai.torch_core import get_model

        handle = get_model(self.model).register_load_state_dict_pre_hook(refuse_unread)
        try:
            return stock(self, *arguments, **options)
        finally:
            handle.remove()

    return load


def check_transfer(stock: Any) -> Any:
    """Wrap `transfer_weights`, which copies tensors by name and so neither compares the attention nor pools heads."""

    @functools.wraps(stock)
    def transfer_weights(model: nn.Module, weights_path: Any, device: Any = None, exclude_head: bool = True) -> None:
        from fastai.torch_core import default_device

        stored = torch.load(weights_path, map_location=default_device() if device is None else device)
        refuse_unread(model, stored)
        sites = [path for path, module in model.named_modules() if isinstance(module, Replacement | TorchAttention)]
        if not sites:
            stock(model, weights_path, device, exclude_head)
            return
        own: dict[str, Tensor] = {
            name: x for name, x in model.state_dict().items() if not (exclude_head and "head" in name)
        }
        fits = {
            name: x
            for name, x in stored.items()
            if (name in own and x.shape == own[name].shape) or any(name.startswith(f"{path}.") for path in sites)
        }
        if not fits:
            raise CheckpointError(f"{weights_path} and the model have no weights in common")
        model.load_state_dict(fits, strict=False)
        left = [name for name in own if name not in fits and not name.endswith(ENTRY)]
        print(f"check unmatched_layers: {left}" if left else f"weights from {weights_path} successfully transferred!\n")

    return transfer_weights
