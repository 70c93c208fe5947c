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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from quest_core.checkpoints import ENTRY, unexpected_entry
from quest_core.errors import CheckpointError, ConfigError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.inject import KEYS, Request

from .layers import FLASH, SerializedAttention

POINTCEPT = [
    f"pointcept.models.point_transformer_v3.point_transformer_v3{m}" for m in ("m1_base", "m2_sonata", "m3_utonia")
]
POINTCEPT_MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3")  # names in Pointcept's registry
TORCH_POINTCLOUD = "torch_pointcloud.layers.serialized_attention"

MODELS = {
    **dict.fromkeys(POINTCEPT, ("PointTransformerV3",)),
    "torch_pointcloud.models.point_transformer_v3": tuple(
        f"PointTransformerV3{part}" for part in ("Encoder", "Decoder", "Classification", "Segmentation")
    ),
    "torch_pointcloud.models.sonata": ("SonataSegmentation",),
    "torch_pointcloud.models.concerto": ("ConcertoSegmentation",),
    "torch_pointcloud.models.utonia": ("UtoniaSegmentation",),
}
"""Module -> its models whose constructor reads the keys."""
ATTENTION = {
    **dict.fromkeys(POINTCEPT, ("SerializedAttention",)),
    TORCH_POINTCLOUD: ("SerializedAttention", "SerializedAttentionRPE", "SerializedAttentionRoPE"),
}
"""Module -> the hosts' own attention in it."""


Stock = Callable[..., Any]


def install(adapter: Adapter) -> None:
    """Change every host, each module as soon as it is imported."""
    patches = adapter.patches
    for kinds, name, change in (
        (MODELS, "__init__", functools.partial(build, adapter)),
        (ATTENTION, "_load_from_state_dict", refuse_others),
        ({"pointcept.utils.config": ("Config",)}, "__init__", check_when_filled),
        ({"pointcept.utils.config": ("Config",)}, "merge_from_dict", check_when_filled),
    ):
        for module, classes in kinds.items():
            for kind in classes:
                patches.around(f"{module}:{kind}", name, change)
    patches.when_imported("pointcept.utils.config", functools.partial(_change_processes_and_logs, adapter))
    if importlib.util.find_spec("torch_pointcloud"):
        for module in ("torch_pointcloud.utils.state_dict", "torch_pointcloud.models._registry"):
            loader = functools.partial(load_attention_first, adapter)
            patches.around(importlib.import_module(module), "load_state_dict", loader)


def _change_processes_and_logs(adapter: Adapter) -> None:
    from pointcept.utils.config import Config

    adapter.patches.put(Config, "__reduce__", reduce)
    adapter.forward_notices(lambda: logging.getLogger("pointcept"))  # which does not propagate to the root logger


# --- models ---------------------------------------------------------------------------------------------------------


def build(adapter: Adapter, stock: Stock, self: Any, *arguments: Any, **options: Any) -> None:
    """Build a stock model, then replace its attention if `options` ask for another one.

    flash-attn is not required, because the attention is replaced, so the stock model is built without it.
    """
    request = Request.read(options, type(self).__name__)
    options = {name: value for name, value in options.items() if name not in KEYS}
    if request is None:
        return stock(self, *arguments, **options)
    given = inspect.signature(stock).bind(self, *arguments, **options)
    given.apply_defaults()
    (flash,) = [name for name in FLASH if name in given.arguments]
    packed, given.arguments[flash] = given.arguments[flash], False
    stock(*given.args, **given.kwargs)
    for site in adapter.sites(self):
        setattr(site.module, flash, packed)
    request.apply(self, adapter)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def refuse_others(stock: Stock, self: Any, state_dict: Any, prefix: str, *arguments: Any) -> None:
    """Load a host's own attention, but refuse weights of another attention, whether the load is strict or not."""
    key = f"{prefix}mechanism.{ENTRY}"
    if key in state_dict:
        raise unexpected_entry(key, state_dict[key], "the host")
    stock(self, state_dict, prefix, *arguments)


def load_attention_first(
    adapter: Adapter,
    stock: Stock,
    model: nn.Module,
    state_dict: Mapping[str, Any],
    source: str,
    *others: Any,
    **more: Any,
) -> None:
    """Load a checkpoint as torch-pointcloud does, which drops every key and shape that the model does not have.

    PyTorch loads the attention before that: it is compared, and key/value heads are pooled if the model has fewer.
    Stock weights go into stock attention as torch-pointcloud loads them.
    """
    found = [(f"{site.path}." if site.path else "", site.module) for site in adapter.sites(model)]
    sites = tuple(
        path
        for path, module in found
        if isinstance(module, SerializedAttention) or f"{path}mechanism.{ENTRY}" in state_dict
    )
    attention = {name: x for name, x in state_dict.items() if name.startswith(sites)}
    try:
        model.load_state_dict(attention, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{source}: {error}") from error
    loaded = {name: x for name, x in model.state_dict().items() if name in attention or ".mechanism." in name}
    rest = {name: x for name, x in state_dict.items() if name not in attention}
    stock(model, rest | loaded, source, *others, **more)


# --- Pointcept's Config ---------------------------------------------------------------------------------------------


def check_when_filled(stock: Stock, self: Any, *arguments: Any, **options: Any) -> None:
    """Fill a Config, and refuse a wrong `attention` before a run's files are written."""
    from pointcept.models.builder import MODELS as registry

    stock(self, *arguments, **options)
    check(self._cfg_dict, registry)


def check(config: Mapping[str, Any], models: Any) -> None:
    """Raise ConfigError if `config` asks for an attention that is misspelt, or in a place that no model reads.

    Args:
        config: a whole configuration; the model is under "model".
        models: Pointcept's registry of models.
    """
    for path, section in _sections(config, ""):
        kind = section.get("type")
        model = models.get(kind) if isinstance(kind, str) else kind
        if kind in POINTCEPT_MODELS and model is not None:
            Request.read(section, path, section.keys() - inspect.signature(model).parameters - {"type"})
            continue
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
