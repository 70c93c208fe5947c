"""MmengineAdapter: how `attention=` reaches the models of a library on mmengine.

>>> model = dict(type="quest_mmseg.EncoderDecoder", attention="quest", ...)

A config names classes of the plugin's scope, which build the host's own class and then inject: before wrapping,
optimizer, EMA, `init_weights` and `load_from`, so all of these see the new parameters. All other arguments and the
names of the parameters are the host's. Any other `attention` in a config is an error.
"""

import copy
import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mmcv.cnn import NonLocal1d, NonLocal2d, NonLocal3d
from mmengine.config import Config
from mmengine.infer import BaseInferencer
from mmengine.logging import MMLogger
from mmengine.model import BaseModule, BaseTTAModel, is_model_wrapper
from mmengine.registry import Registry
from mmengine.runner import FlexibleRunner, Runner, checkpoint
from torch import nn

from quest_core.checkpoints import refuse_entries
from quest_core.compat import FUSED_ON_CPU, FUSED_ON_CPU_BACKWARD
from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Adapter, HostAttention, Site, refuses_chained, sections
from quest_core.hosts.inject import REPORT
from quest_core.hosts.request import KEYS, Request, open_texts, rehearse
from quest_core.projections import init_norms


class MmengineAdapter(Adapter):
    """Base of the adapters for libraries on mmengine, whose `name` is that of the library's package."""

    package: ClassVar[str]
    """The plugin's package, which is also the scope of its registry."""
    types: ClassVar[frozenset[str]]
    """Names of the host's classes that the plugin offers with `attention`, as "<package>.<name>"."""
    models: ClassVar[Registry]
    """The plugin's registry."""

    def apply(self, request: Request, model: Any) -> None:
        """Inject what a config asks for into a model that was just built."""
        request.apply(model, self)

    @classmethod
    def register_with_attention(cls, homes: Iterable[Any]) -> dict[str, type[Any]]:
        """Register each of `types` that a module in `homes` has, with the further keys; return them by name."""
        made = {}
        for home in homes:
            for name in sorted(name for name in cls.types if inspect.isclass(getattr(home, name, None))):
                doc = f"{cls.name}'s {name}, which accepts attention."
                body = {"__module__": f"{cls.package}.models", "__doc__": doc, "adapter": cls}
                made[name] = type(name, (WithAttention, getattr(home, name)), body)
                cls.models.register_module(module=made[name])
        return made

    def attends(self, module: nn.Module) -> bool:
        """Two of the modes of mmcv's non-local blocks are a softmax of products of two convolutions."""
        kinds = (NonLocal1d, NonLocal2d, NonLocal3d)
        return isinstance(module, kinds) and module.mode in ("gaussian", "embedded_gaussian")

    def change_host(self) -> None:
        """Change mmengine itself, if no other plugin has done so; see `Mmengine`.

        `uninstall` leaves the types of the plugin's scope in mmengine's registry.
        """
        self.patches.once("mmengine", lambda: Mmengine().join(type(self)), lambda: Mmengine().leave(type(self)))

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the sites of a model; in backbones with a reduction, each stage is a stack of its own."""
        for site in super().sites(model):
            stage = re.sub(r"\d+(?=\D*$)", "*", site.path) if hasattr(site.module, "sr_ratio") else None
            yield replace(site, stack=stage)

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        """Have `init_weights`, which Runners call later, keep what belongs to the attention.

        Raises:
            UnsupportedError: layers of Mask2Former, which see images of several sizes in turn, would be compared.
        """
        for path, layer in model.named_modules():
            if type(layer).__name__ == "Mask2FormerTransformerDecoderLayer" and layer.cross_attn in drafts:
                config = drafts[layer.cross_attn].attn.config
                if why := refuses_chained(config):
                    raise UnsupportedError(f"attention '{config}' cannot be used at '{path}.cross_attn': {why}")
        for module in _initializers(model):
            if any(inner in drafts for inner in module.modules()):
                drafts.setdefault(module, draft(module)).init_weights = functools.partial(_init_weights, module)

    @classmethod
    def our_parts(cls, config: Any, at: str = "") -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Yield (path, mapping, class name) of each part of a model's config whose type is one of this plugin.

        Raises ConfigError where a class of the host itself is given an attention. Some of them ignore unknown keys.

        Args:
            at: the path of `config`, for messages.
        """
        for path, part in sections(config, at):
            kind = part.get("type") or ""
            home, _, name = (kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}").rpartition(".")
            package = home.partition(".")[0]
            if package == cls.package and name in cls.types:
                yield path, part, name
            elif name and package in ("", cls.name, cls.package) and part.get("attention") is not None:
                said = f"{path}.attention is '{part['attention']}', and {cls.name}'s {name} does not read it"
                if name in cls.types:
                    ours = f"type='{cls.package}.{name}' too (--cfg-options {path}.type={cls.package}.{name})"
                    raise ConfigError(f"{said}; write {path}.{ours}")
                host = cls.models.get(name) if isinstance(kind, str) else kind
                if host and host.__module__.startswith(f"{cls.name}.") and "attention" not in _parameters(host):
                    raise ConfigError(f"{said}; write it into the model or a backbone, with a type of {cls.package}")

    @classmethod
    def read(cls, options: Mapping[str, Any], kind: Any) -> Request | None:
        """Return what the options of a class of this plugin ask for; None if its parts have their own attention."""
        name = f"{cls.package}.{kind.__name__}"
        request = Request.read(options, name, options.keys() - _parameters(kind) - {"type"})
        inner = [(path, part.get("attention")) for path, part, _ in cls.our_parts(options) if path]
        parts = [(path, AttentionConfig.parse(own)) for path, own in inner if own is not None]
        if request is None and not parts:
            raise ConfigError(
                f"'{name}' has no attention; write dict(type='{name}', attention='quest', ...), or --cfg-options "
                f"model.attention=quest; {cls.name}'s own attention is type='{kind.__name__}' or attention='standard'"
            )
        if request is not None and parts:
            path, own = parts[0]
            raise ConfigError(
                f"attention is named twice: '{request.attention}' for {name} and '{own}' for its {path}; keep one"
            )
        return request


class Mmengine(Adapter):
    """mmengine itself, which is changed once, until the last plugin for a library on it leaves."""

    name: ClassVar[str] = "mmengine"
    plugins: ClassVar[list[type[MmengineAdapter]]] = []
    """The installed ones."""

    def join(self, plugin: type[MmengineAdapter]) -> None:
        """Change mmengine for a plugin too."""
        self.install()
        self.plugins.append(plugin)

    def leave(self, plugin: type[MmengineAdapter]) -> None:
        """Undo `join`."""
        self.plugins.remove(plugin)
        if not self.plugins:
            self.uninstall()

    def change_host(self) -> None:
        """Have Runners (before they create a file) and inferencers check their config, and write notices to the log.

        mmengine's loader, which only logs keys that a model does not have, raises for those that name an attention, and
        the FLOP counters of mmengine, fvcore and PyTorch count the fused attention as the two products of a host's own.
        `--cfg-options` can add an option to an attention that a config file writes as a text.
        A plugin that a type's name imports comes too late for the check: write `custom_imports`, or use `quest run`.
        """

        def check_runner(stock: Callable[..., Any], runner: Any, *arguments: Any, **options: Any) -> Any:
            """Make a runner after checking its config and its model."""
            given = inspect.signature(stock).bind(runner, *arguments, **options).arguments
            model = given["model"]
            check_config(given.get("cfg") or {}, model)
            for plugin in self.plugins if isinstance(model, Mapping) else ():
                if any(plugin.our_parts(model)):
                    rehearse(functools.partial(plugin.models.build, copy.deepcopy(model)))
            return stock(runner, *arguments, **options)

        def load(stock: Callable[..., None], module: Any, state_dict: Any, *rest: Any, **o: Any) -> None:
            """Load a checkpoint, unless it names the attention of a module that has the host's own."""
            while is_model_wrapper(module) or isinstance(module, BaseTTAModel):
                module = module.module
            refuse_entries(module, state_dict, " or ".join(plugin.name for plugin in self.plugins))
            stock(module, state_dict, *rest, **o)

        def inferring(stock: Callable[..., Any], inferencer: Any, cfg: Any, *rest: Any, **options: Any) -> Any:
            """Return the model of an inferencer after checking it and its config."""
            model = stock(inferencer, cfg, *rest, **options)
            check_config(cfg or {}, model)
            return model

        def merge(stock: Callable[..., None], config: Any, options: Mapping[str, Any], *rest: Any, **o: Any) -> None:
            """Merge the options of a command line into a config."""
            stock(config, open_texts(config._cfg_dict, options), *rest, **o)

        for kind in (Runner, FlexibleRunner):
            self.patches.around(kind, "__init__", check_runner)
        self.patches.around(BaseInferencer, "_init_model", inferring)
        self.patches.around(checkpoint, "load_state_dict", load, everywhere=True)
        self.patches.around(Config, "merge_from_dict", merge)
        for module, table, formulas in COUNTERS:
            self.patches.when_imported(module, functools.partial(self._count, module, table, formulas))
        self.forward_notices(MMLogger.get_current_instance)

    def _count(self, module: str, table: str, formulas: Mapping[Any, Any]) -> None:
        """Add formulas to the table of an imported FLOP counter."""
        counted = getattr(sys.modules[module], table)
        self.patches.once(table, lambda: counted.update(formulas), lambda: [counted.pop(key, None) for key in formulas])


def check_config(config: Any, model: Any) -> None:
    """Raise ConfigError if a config asks for an attention wrongly, or for one that the model does not have.

    A variable of a config file is a key at its top level, which mmengine does not read: ``attention`` there is
    valid only if the model has that attention. ``backbone.attention`` on a command line makes such a key too.

    Args:
        config: mmengine's Config of a run or of `init_model`.
        model: a model, or its config.
    """
    parts, built = config.get("model"), set()
    for plugin, part in itertools.product(Mmengine.plugins, (parts, model)):
        for _, options, name in [*plugin.our_parts(part, "model")]:  # before `read`, whose paths begin at `options`
            request = plugin.read(options, plugin.models.get(name))
            built |= {str(request.attention)} if request else set()
    hosts = " or ".join(plugin.name for plugin in Mmengine.plugins)
    packages = " or ".join(plugin.package for plugin in Mmengine.plugins)
    for key in parts if isinstance(parts, Mapping) else ():
        part = config.get(key)
        if isinstance(part, Mapping) and "type" not in part and part.get("attention") is not None:
            raise ConfigError(
                f"{key}.attention is '{part['attention']}', which nothing reads; write model.attention="
                f"'{part['attention']}', or model.{key}.attention for this part, with a type of {packages}"
            )
    if config.get("attention") is None:
        return
    wanted = AttentionConfig.parse(config["attention"])
    if isinstance(model, nn.Module):
        built = {getattr(module, REPORT).attention for module in model.modules() if hasattr(module, REPORT)}
    if not any(wanted.means(attention) for attention in built):
        has = f"attention '{', '.join(sorted(built))}'" if built else f"{hosts}'s own attention"
        raise ConfigError(
            f"attention is '{wanted}' at the top level of the config, where nothing reads it; the model has {has}; "
            f"write model.attention='{wanted}' (--cfg-options model.attention=...) with a type of {packages}"
        )


class WithAttention:
    """Builds the host's model, then replaces its attention. Every argument is checked before anything is built.

    Args:
        attention: the mechanism for every attention module: a name, a text such as ``"quest+gqa(kv_heads=1)"`` or a
            mapping with `name` and options. None if parts of the model have their own.
        attention_from: the attention of the checkpoints to load, if it is another on purpose.
        allow_partial: go on if the model has other attention modules, which cannot be replaced.

    Raises:
        ConfigError: an attention is misspelt, missing, named twice, or named where it is not read.
        InjectionError: attention modules would stay as they are, and `allow_partial` is False.
    """

    adapter: ClassVar[type[MmengineAdapter]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        request = self.adapter.read(options, type(self))
        options = {key: value for key, value in options.items() if key not in KEYS}
        super().__init__(*arguments, **options)
        if request is not None:
            self.adapter().apply(request, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "cfg":  # `init_model` and `init_detector` set the whole Config
            check_config(value, self)
        super().__setattr__(name, value)


def _parameters(kind: Any) -> set[str]:
    """Return the names of the arguments of a class and its bases."""
    return {key for base in kind.__mro__ for key in inspect.signature(base.__init__).parameters}


def _initializers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose `init_weights` no other one calls."""
    if isinstance(model, BaseModule):
        yield model
    else:
        for child in model.children():
            yield from _initializers(child)


def _init_weights(model: Any) -> None:
    """Initialize a model as its class does, and then set the initial norms that the attention asks for.

    Projections that the host has loaded (``init_cfg=dict(type="Pretrained")``) are not changed. DETR-like models draw
    every parameter of their Transformer; those of a mechanism keep their values.
    """
    parts = [part for part in model.modules() if isinstance(part, HostAttention)]
    kept = [[own.detach().clone() for own in part.mechanism.parameters()] for part in parts]
    loaded: set[HostAttention] = set()
    hooks = [part.register_load_state_dict_pre_hook(lambda part, *_: loaded.add(part)) for part in parts]
    type(model).init_weights(model)
    for part, values, hook in zip(parts, kept, hooks, strict=True):
        hook.remove()
        if part not in loaded:
            init_norms(part)
            for own, value in zip(part.mechanism.parameters(), values, strict=True):
                own.data.copy_(value)


def _products(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Return the multiplications of q·kᵀ and of the weights with v, from shapes."""
    return math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


_TRACED: dict[Any, Any] = {
    "aten::scaled_dot_product_attention": lambda inputs, outputs: _products(*(x.type().sizes() for x in inputs[:3]))
}
COUNTERS: tuple[tuple[str, str, dict[Any, Any]], ...] = (
    ("mmengine.analysis.complexity_analysis", "_DEFAULT_SUPPORTED_FLOP_OPS", _TRACED),
    ("fvcore.nn.flop_count", "_DEFAULT_SUPPORTED_OPS", _TRACED),
    (
        "torch.utils.flop_counter",  # it counts two operations for each multiplication, and the kernels of GPUs
        "flop_registry",
        {
            FUSED_ON_CPU: lambda q, k, v, *_, **__: 2 * _products(q.shape, k.shape, v.shape),
            FUSED_ON_CPU_BACKWARD: lambda _, q, k, v, *__, **___: 4 * _products(q.shape, k.shape, v.shape),
        },
    ),
)
"""FLOP counters that count no fused attention: module, table, and its further formulas."""
