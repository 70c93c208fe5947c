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
from typing import Any

from torch import nn

from quest_core.checkpoints import ENTRY, unread
from quest_core.config import AttentionSpec
from quest_core.errors import CheckpointError, ConfigError, PluginError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.discovery import require_host
from quest_core.hosts.injection import KEYS, Request

from .layers import SerializedAttention

POINTCEPT_MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3")  # names in Pointcept's registry
TORCH_POINTCLOUD_MODELS = {
    "point_transformer_v3": ("Encoder", "Decoder", "Classification", "Segmentation"),  # after PointTransformerV3
    "sonata": ("SonataSegmentation",),
    "concerto": ("ConcertoSegmentation",),
    "utonia": ("UtoniaSegmentation",),
}
TORCH_POINTCLOUD_ATTENTION = "torch_pointcloud.layers.serialized_attention"
TORCH_POINTCLOUD_CLASSES = ("SerializedAttention", "SerializedAttentionRPE", "SerializedAttentionRoPE")

FLASH = ("enable_flash", "use_flash_attn")  # the hosts' names of the option that asks for flash-attn
UNFUSED = ("enable_rpe", "upcast_attention", "upcast_softmax", "upcast_attn")  # what they refuse together with it


def install(adapter: Adapter) -> None:
    """Patch every host that can be imported.

    Raises:
        PluginError: no host is installed, or the installed one cannot be used.
    """
    pointcept, torch_pointcloud = (importlib.util.find_spec(name) for name in ("pointcept", "torch_pointcloud"))
    require_host(adapter.name)
    if pointcept:
        _install_pointcept(adapter)
    if torch_pointcloud:
        _install_torch_pointcloud(adapter)


def _install_pointcept(adapter: Adapter) -> None:
    try:
        from pointcept.models.builder import MODELS
        from pointcept.utils.config import Config

        importlib.import_module("pointcept.models")  # fills the registry
    except ImportError as error:
        raise PluginError(
            f"Pointcept cannot be imported: {error}; install the requirements of its README, or remove its checkout "
            "from PYTHONPATH"
        ) from error
    for model in filter(None, map(MODELS.get, POINTCEPT_MODELS)):  # an older checkout has fewer
        accept(model, adapter)
        attention = importlib.import_module(model.__module__).SerializedAttention
        adapter.patches.wrap(attention, "_load_from_state_dict", guarded)
    for name in ("__init__", "merge_from_dict"):
        adapter.patches.wrap(Config, name, functools.partial(checked, MODELS))
    adapter.patches.put(Config, "__reduce__", reduce)
    adapter.forward_notices(lambda: logging.getLogger("pointcept"))  # which does not propagate to the root logger


def _install_torch_pointcloud(adapter: Adapter) -> None:
    for module, names in TORCH_POINTCLOUD_MODELS.items():
        models = importlib.import_module(f"torch_pointcloud.models.{module}")
        for name in names:
            accept(getattr(models, name, None) or getattr(models, f"PointTransformerV3{name}"), adapter)
    layers = importlib.import_module(TORCH_POINTCLOUD_ATTENTION)
    stock = tuple(getattr(layers, name) for name in TORCH_POINTCLOUD_CLASSES)
    for kind in stock:
        adapter.patches.wrap(kind, "_load_from_state_dict", guarded)
    for module in ("torch_pointcloud.utils.state_dict", "torch_pointcloud.models._registry"):
        wrapper = functools.partial(fitting, stock)
        adapter.patches.wrap(importlib.import_module(module), "load_state_dict", wrapper)


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
            values = (attention, attention_from, allow_partial)
            request = Request.read(dict(zip(KEYS, values, strict=True)), model.__name__)
            if request is None:
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
            request.apply(self, adapter)

        own = inspect.signature(__init__, follow_wrapped=False).parameters
        both = [*signature.parameters.values(), *(own[key] for key in KEYS)]
        __init__.__signature__ = signature.replace(parameters=sorted(both, key=lambda p: p.kind))  # type: ignore[attr-defined]
        return __init__

    adapter.patches.wrap(model, "__init__", make)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def guarded(stock: Any) -> Any:
    """Wrap the loading of a host's own attention, which then refuses weights of another attention."""

    @functools.wraps(stock)
    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
        key, errors = f"{prefix}mechanism.{ENTRY}", arguments[-1]  # PyTorch raises the errors, strict or not
        if key in state_dict and not any(ENTRY in error for error in errors):  # one message for all layers
            errors.append(unread(key, state_dict[key], "the host"))
        stock(self, state_dict, prefix, *arguments)

    return _load_from_state_dict


def fitting(hosts: tuple[type[nn.Module], ...], stock: Any) -> Any:
    """Wrap torch-pointcloud's `load_state_dict`, which drops every key and shape that the model does not have.

    Each attention first reads its own weights: it compares the attention, and pools key/value heads if it has fewer.

    Args:
        hosts: the classes of the host's own attention.
        stock: the host's function.
    """

    @functools.wraps(stock)
    def load_state_dict(
        model: nn.Module, state_dict: Mapping[str, Any], source: str, *arguments: Any, **options: Any
    ) -> None:
        weights, missing, errors = dict(state_dict), list[str](), list[str]()  # `missing` is shared: one warning
        for path, module in model.named_modules():
            parts = [(path, module)] if isinstance(module, hosts) else []
            if isinstance(module, SerializedAttention):
                parts = list(module.named_modules(prefix=path))
            for name, part in parts:
                part._load_from_state_dict(weights, f"{name}." if name else "", {}, False, missing, [], errors)
        if errors:
            raise CheckpointError(f"{source}: {errors[0]}")
        stock(model, weights, source, *arguments, **options)

    return load_state_dict


# --- Pointcept's Config -------------------------------------------------------------------------------------


def checked(models: Any, stock: Any) -> Any:
    """Wrap a method that fills a Config, which then refuses a wrong `attention` before a run's files are written."""

    @functools.wraps(stock)
    def fill(self: Any, *arguments: Any, **options: Any) -> None:
        stock(self, *arguments, **options)
        check(self._cfg_dict, models)

    return fill


def check(config: Mapping[str, Any], models: Any) -> None:
    """Raise ConfigError if `config` asks for an attention that is misspelt, or in a place that no model reads.

    Args:
        config: a whole configuration; the model is under "model".
        models: Pointcept's registry of models.
    """
    for path, section in _sections(config, ""):
        kind = section.get("type")
        if kind in POINTCEPT_MODELS:
            Request.read(section, path)
            continue
        model = models.get(kind) if isinstance(kind, str) else kind
        if model is None and (kind is not None or path.startswith("model.")):
            continue  # another registry's, or options that a model passes on
        for key in ("attention", "attention_from"):
            if section.get(key) is not None and (model is None or key not in inspect.signature(model).parameters):
                raise ConfigError(
                    f"{path + '.' if path else ''}{key}={section[key]!r} is not read by {kind or 'Pointcept'}; write "
                    f"it into the backbone of type {', '.join(POINTCEPT_MODELS)}, as in model.backbone.{key}"
                )


def _sections(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every mapping inside `value` with its dotted path."""
    if isinstance(value, Mapping):
        yield path, value
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
    for name, inner in items:
        yield from _sections(inner, f"{path}.{name}" if path else str(name))


def reduce(config: Any) -> tuple[Any, ...]:
    """Pickle a Config so that the process that reads it imports this plugin.

    Pointcept's launcher hands the Config to one process for each GPU. They never read the file, so `custom_imports`
    does not run there. The Config is rebuilt by a function of this package.
    """
    return _rebuild, (type(config),), config.__getstate__()


def _rebuild(kind: Any) -> Any:
    return kind.__new__(kind)
