"""How Pointcept and torch-pointcloud learn `attention`. The README lists every change to them with its reason.

The constructor of a model builds the stock model and then injects. Pointcept's registry, its configs, the models that
hold a backbone and torch-pointcloud's `create_model` all call the constructor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quest_core.checkpoints import ENTRY, read
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import CheckpointError, ConfigError, PluginError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.discovery import require_host
from quest_core.hosts.injection import inject
from quest_core.hosts.patching import Patches
from quest_core.mechanism import Mechanism

from .layers import SerializedAttention

POINTCEPT_MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3")
"""Names in Pointcept's registry."""

TORCH_POINTCLOUD_MODELS = {
    "torch_pointcloud.models.point_transformer_v3": (
        "PointTransformerV3Encoder",
        "PointTransformerV3Decoder",
        "PointTransformerV3Classification",
        "PointTransformerV3Segmentation",
    ),
    "torch_pointcloud.models.sonata": ("SonataSegmentation",),
    "torch_pointcloud.models.concerto": ("ConcertoSegmentation",),
    "torch_pointcloud.models.utonia": ("UtoniaSegmentation",),
}

TORCH_POINTCLOUD_ATTENTION = "torch_pointcloud.layers.serialized_attention"
TORCH_POINTCLOUD_CLASSES = ("SerializedAttention", "SerializedAttentionRPE", "SerializedAttentionRoPE")

FLASH = ("enable_flash", "use_flash_attn")
"""The hosts' names of the option that asks for flash-attn."""

UNFUSED = ("enable_rpe", "upcast_attention", "upcast_softmax", "upcast_attn")
"""Options that the hosts refuse beside it."""


def install(adapter: Adapter) -> bool:
    """Patch every host that can be imported.

    Returns:
        Whether Pointcept is one of them.

    Raises:
        PluginError: no host is installed, or the installed one cannot be used.
    """
    pointcept = importlib.util.find_spec("pointcept") is not None
    torch_pointcloud = importlib.util.find_spec("torch_pointcloud") is not None
    require_host(adapter.name)
    if pointcept:
        _install_pointcept(adapter)
    if torch_pointcloud:
        _install_torch_pointcloud(adapter)
    return pointcept


def _install_pointcept(adapter: Adapter) -> None:
    try:
        from pointcept.models.builder import MODELS
        from pointcept.utils.config import Config

        importlib.import_module("pointcept.models")  # fills the registry
    except ImportError as error:
        found = importlib.util.find_spec("pointcept")
        where = Path(found.origin).parent if found and found.origin else "the checkout"
        raise PluginError(
            f"Pointcept at {where} cannot be imported: {error}; install the requirements of its README, or remove it "
            "from PYTHONPATH"
        ) from error
    patches = adapter.patches
    for model in filter(None, map(MODELS.get, POINTCEPT_MODELS)):  # an older checkout has fewer
        accept(model, adapter)
        guard(importlib.import_module(model.__module__).SerializedAttention, patches)
    for name in ("__init__", "merge_from_dict"):
        patches.wrap(Config, name, lambda stock: _checked(stock, MODELS))
    patches.put(Config, "__reduce__", _reduce)


def _install_torch_pointcloud(adapter: Adapter) -> None:
    for module, names in TORCH_POINTCLOUD_MODELS.items():
        for name in names:
            accept(getattr(importlib.import_module(module), name), adapter)
    layers = importlib.import_module(TORCH_POINTCLOUD_ATTENTION)
    stock = [getattr(layers, name) for name in TORCH_POINTCLOUD_CLASSES]
    for kind in stock:
        guard(kind, adapter.patches)
    fit = functools.partial(fitting, (*stock, SerializedAttention, Mechanism))
    for module in ("torch_pointcloud.utils.state_dict", "torch_pointcloud.models._registry"):
        adapter.patches.wrap(importlib.import_module(module), "load_state_dict", fit)


# --- models ---------------------------------------------------------------------------------------------------------


def accept(model: type[Any], adapter: Adapter) -> None:
    """Let the constructor of a model class take `attention`, `attention_from` and `allow_partial`."""
    signature = inspect.signature(model.__init__)
    (flash,) = [name for name in FLASH if name in signature.parameters]

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def __init__(
            self: Any,
            *arguments: Any,
            attention: AttentionSpec | None = None,
            attention_from: AttentionSpec | None = None,
            allow_partial: bool = False,
            **options: Any,
        ) -> None:
            config = parse(model.__name__, attention, attention_from, allow_partial)
            if config is None:
                stock(self, *arguments, **options)
                return
            given = signature.bind(self, *arguments, **options)
            given.apply_defaults()
            packed = bool(given.arguments[flash])
            if packed:
                asked = [f"{name}=True" for name in UNFUSED if given.arguments.get(name)]
                asked += ["attn_kind='rpe'"] if given.arguments.get("attn_kind") == "rpe" else []
                if asked:
                    raise ConfigError(
                        f"{model.__name__}: {asked[0]} needs {flash}=False, because it has no fused kernel"
                    )
                given.arguments[flash] = False  # flash-attn is not required, because the attention is replaced
            stock(*given.args, **given.kwargs)
            if packed:
                for site in adapter.sites(self):
                    setattr(site.module, flash, True)
            _, report = inject(
                self, config, adapter=adapter, fresh=True, attention_from=attention_from, allow_partial=allow_partial
            )
            report.announce()

        ours = [p for p in inspect.signature(__init__, follow_wrapped=False).parameters.values() if p.name in KEYS]
        known = list(signature.parameters.values())
        end = len(known) - (1 if known and known[-1].kind is inspect.Parameter.VAR_KEYWORD else 0)
        __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*known[:end], *ours, *known[end:]]
        )
        return __init__

    adapter.patches.wrap(model, "__init__", make)


KEYS = ("attention", "attention_from", "allow_partial")


def parse(
    where: str, attention: AttentionSpec | None, attention_from: AttentionSpec | None, allow_partial: bool
) -> AttentionConfig | None:
    """Return the attention that a model is built with; None means the host's own.

    Raises:
        ConfigError: a mechanism or option is unknown, or one of the other keys stands without `attention`.
    """
    if attention_from is not None:
        AttentionConfig.parse(attention_from)
    if attention is not None:
        return AttentionConfig.parse(attention)
    if attention_from is not None or allow_partial:
        key = "allow_partial" if attention_from is None else "attention_from"
        raise ConfigError(f"{where}: {key} is read only beside attention; add attention='quest' or remove {key}")
    return None


# --- checkpoints ----------------------------------------------------------------------------------------------------


def guard(attention: type[nn.Module], patches: Patches) -> None:
    """Let the host's own attention refuse weights of another one.

    Pointcept's CheckpointLoader is not strict and does not report unexpected keys, so the key that names the attention
    would be lost silently. PyTorch raises what is in `errors`, strict or not.
    """

    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
            spelled, errors = state_dict.get(f"{prefix}mechanism.{ENTRY}"), arguments[-1]
            if spelled is not None and not any(ENTRY in error for error in errors):  # one message for all layers
                errors.append(
                    f"'{prefix}mechanism.{ENTRY}' says that this checkpoint was trained with attention "
                    f"'{read(spelled)}', and the model has the host's own; build the model with "
                    f"attention='{read(spelled)}', or with attention='standard' and attention_from='{read(spelled)}' "
                    "if you mean to go on from these weights with standard attention"
                )
            stock(self, state_dict, prefix, *arguments)

        return _load_from_state_dict

    patches.wrap(attention, "_load_from_state_dict", make)


def fitting(kinds: tuple[type[Any], ...], stock: Any) -> Any:
    """Wrap torch-pointcloud's `load_state_dict`, which drops a key that the model lacks and a tensor of another shape.

    It decides before PyTorch loads anything. Here every attention first reads its own weights: it compares the
    attention, and pools the key/value heads if the model has fewer.

    Args:
        kinds: the classes with such a reading.
        stock: the host's function.
    """

    @functools.wraps(stock)
    def load_state_dict(
        model: nn.Module, state_dict: Mapping[str, Any], source: str, *arguments: Any, **options: Any
    ) -> None:
        weights, missing, errors = dict(state_dict), list[str](), list[str]()  # shared: one warning for all layers
        found = [(f"{path}." if path else "", m) for path, m in model.named_modules() if isinstance(m, kinds)]
        for prefix, module in found:
            module._load_from_state_dict(weights, prefix, {}, False, missing, [], errors)
        for prefix, module in found:
            own = module.state_dict(prefix=prefix) if isinstance(module, SerializedAttention) else {}
            for name in (f"{prefix}qkv.weight", f"{prefix}qkv.bias"):
                if name in own and weights.get(name, own[name]).shape != own[name].shape:
                    errors.append(
                        f"'{name}' has the shape {list(weights[name].shape)}, and {list(own[name].shape)} in the "
                        f"model, whose attention is '{module.config}'; build it with the heads and channels of the "
                        "checkpoint"
                    )
        if errors:
            raise CheckpointError(f"{source}: {errors[0]}")
        stock(model, weights, source, *arguments, **options)

    return load_state_dict


# --- Pointcept's Config ---------------------------------------------------------------------------------------------


def _checked(stock: Any, models: Any) -> Any:
    """Wrap a method that fills a Config: a wrong `attention` is refused before a run's files are overwritten."""

    @functools.wraps(stock)
    def fill(self: Any, *arguments: Any, **options: Any) -> None:
        stock(self, *arguments, **options)
        check(self._cfg_dict, models)

    return fill


def check(config: Mapping[str, Any], models: Any) -> None:
    """Raise ConfigError if `config` asks for an attention that is misspelt, or in a place that no model reads.

    Args:
        config: all of it; the model is under "model".
        models: Pointcept's registry of models.
    """
    for path, section in _sections(config, ""):
        kind = section.get("type")
        if kind in POINTCEPT_MODELS:
            parse(path, *(section.get(key) for key in KEYS))  # type: ignore[arg-type]
            continue
        model = models.get(kind) if isinstance(kind, str) else kind
        if model is None and (kind is not None or path.startswith("model.")):
            continue  # no model, or options that a model reads by itself
        for key in ("attention", "attention_from"):
            if section.get(key) is not None and not _takes(model, key):
                read = f"'{kind}'" if kind else "Pointcept"
                raise ConfigError(
                    f"{path + '.' if path else ''}{key}={section[key]!r} is not read by {read}; write it into the "
                    f"backbone whose type is one of {', '.join(POINTCEPT_MODELS)}, as in model.backbone.{key}"
                )


def _takes(model: Any, key: str) -> bool:
    return model is not None and key in inspect.signature(model).parameters


def _sections(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every mapping inside `value` with its dotted path."""
    if isinstance(value, Mapping):
        yield path, value
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in items:
        yield from _sections(inner, f"{path}.{name}" if path else str(name))


def _reduce(config: Any) -> tuple[Any, ...]:
    """Pickle a Config so that the process that reads it imports this plugin.

    Pointcept's launcher hands the Config to one process for each GPU. They never read the file, so `custom_imports`
    does not run there. The Config is rebuilt by a function of this package.
    """
    return _rebuild, (type(config),), config.__getstate__()


def _rebuild(kind: type[Any]) -> Any:
    made: Any = object.__new__(kind)
    return made


def log() -> logging.Logger:
    """Return Pointcept's logger, which does not propagate to the root logger."""
    return logging.getLogger("pointcept")
