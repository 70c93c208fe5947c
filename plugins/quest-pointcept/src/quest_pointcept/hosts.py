"""How the models and configs of Pointcept and torch-pointcloud accept `attention`.

The constructor of a model builds the stock model and then injects. Pointcept's registry, its configs, the models that
hold a backbone and torch-pointcloud's `create_model` all call the constructor.
"""

import functools
import inspect
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quest_core.checkpoints import ENTRY, unexpected_entry
from quest_core.config import STANDARD
from quest_core.errors import CheckpointError, ConfigError
from quest_core.hosts.adapter import Adapter, sections
from quest_core.hosts.inject import REPORT, inject
from quest_core.hosts.request import KEYS, Request, open_texts, rehearse
from quest_core.mechanism import Mechanism
from quest_core.notices import say
from quest_core.tools.calibration import calibrate, refuse_uncalibratable

from .layers import FLASH, SerializedAttention

POINTCEPT = [
    f"pointcept.models.point_transformer_v3.point_transformer_v3{m}" for m in ("m1_base", "m2_sonata", "m3_utonia")
]
LITEPT = "pointcept.models.litept.litept_v1"
POINTCEPT_MODELS = ("PT-v3m1", "PT-v3m2", "PT-v3m3", "LitePT-v1")  # names in Pointcept's registry
TORCH_POINTCLOUD = "torch_pointcloud.layers.serialized_attention"
LOADER = "torch_pointcloud.utils.state_dict"

MODELS = {
    **dict.fromkeys(POINTCEPT, ("PointTransformerV3",)),
    LITEPT: ("LitePT",),
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
    LITEPT: ("PointROPEAttention",),
    TORCH_POINTCLOUD: ("SerializedAttention", "SerializedAttentionRPE", "SerializedAttentionRoPE"),
}
"""Module -> the hosts' own attention in it."""


Stock = Callable[..., Any]


def install(adapter: Adapter) -> None:
    """Change every host, each module as soon as it is imported."""
    patches, loader = adapter.patches, functools.partial(calibrate_what_was_loaded, adapter)
    for kinds, name, change in (
        (MODELS, "__init__", functools.partial(build, adapter)),
        (ATTENTION, "_load_from_state_dict", refuse_others),
    ):
        for module, classes in kinds.items():
            for kind in classes:
                patches.around(f"{module}:{kind}", name, change)
    patches.around("pointcept.utils.config:Config", "__init__", check_when_filled)
    patches.around("pointcept.utils.config:Config", "merge_from_dict", merge)
    patches.around("pointcept.engines.hooks.misc:CheckpointLoader", "before_train", loader)
    patches.when_imported("pointcept.utils.config", functools.partial(_change_processes_and_logs, adapter))
    patches.when_imported(LOADER, functools.partial(_change_loader, adapter))


def _change_loader(adapter: Adapter) -> None:
    load = functools.partial(load_attention_first, adapter)
    adapter.patches.around(sys.modules[LOADER], "load_state_dict", load, everywhere=True)


def _change_processes_and_logs(adapter: Adapter) -> None:
    from pointcept.utils.config import Config

    adapter.patches.put(Config, "__reduce__", reduce)
    adapter.forward_notices(lambda: logging.getLogger("pointcept"))  # which does not propagate to the root logger


# --- models ---------------------------------------------------------------------------------------------------------

DEPTHS = ("enc_depths", "encoder_depths")
"""The hosts' names of the option that has an entry for each stage."""


@dataclass(frozen=True)
class Asked:
    """The keys of a model, checked before anything is built.

    Attributes:
        parts: the request of each part of the model: "" is all of it, "enc" and "dec" are parts, "0" and so on stages.
        batches: to calibrate with after Pointcept has loaded a checkpoint of standard attention; 0 for none.
    """

    parts: Mapping[str, Request]
    batches: int = 0

    @classmethod
    def read(cls, options: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> "Asked | None":
        """Return what `options` ask for, or None; arguments and errors as of `Request.read`."""
        attention = options.get("attention")
        if "calibrate" in options or re.search(r"\bcalibrate\s*=", str(attention)):
            raise ConfigError(f"{where}: write calibrate into a mapping, attention=dict(name='quest', calibrate=8)")
        if not isinstance(attention, Mapping):
            request = Request.read(options, where, others)
            return None if request is None else cls({"": request})
        given = dict(attention)
        batches, parts, stages = given.pop("calibrate", 0), {"": given}, given.get("stages")
        if given.keys() <= {"enc", "dec"} and given:
            parts = {name: given.get(name, "standard") for name in ("enc", "dec")}
        elif given.keys() == {"stages"} and isinstance(stages, list | tuple):
            parts = {str(i): one for i, one in enumerate(stages)}
        elif given.keys() & {"enc", "dec", "stages"}:
            raise ConfigError(
                f"{where}.attention has the keys {', '.join(map(repr, given))}; write dict(enc=..., dec=...), or "
                "dict(stages=[...]) with an attention for each stage, the finest first"
            )
        requests = {
            name: Request.read({**options, "attention": one}, where, others) or Request(STANDARD)
            for name, one in parts.items()
        }
        if batches:
            _refuse_calibration(where, batches, requests)
        return cls(requests, batches)

    def of(self, path: str, stages: int) -> Request:
        """Return what an attention gets: that of the model, of its encoder or decoder, or of its stage."""
        if "" in self.parts:
            return self.parts[""]
        stage = re.match(r"(enc|dec)(?:\.\1|oder\.blocks\.)(\d+)(?=\.)", path)
        assert stage is not None  # the models of `MODELS` with stages have no others
        if "enc" in self.parts:
            return self.parts[stage[1]]
        # torch-pointcloud's decoder begins with the coarsest.
        return self.parts[str(stages - 2 - int(stage[2]) if stage[0].startswith("decoder") else int(stage[2]))]

    def apply(self, model: nn.Module, adapter: Adapter, stages: int) -> None:
        """Inject into a fresh model, and report it."""
        first = next(iter(self.parts.values()))  # all have its other options
        options: Any = {**vars(first), "attention": lambda site: self.of(site.path, stages).attention}
        _, report = inject(model, adapter=adapter, fresh=True, **options)
        said = "; ".join(f"{name}: {one.attention}".removeprefix(": ") for name, one in self.parts.items())
        report = replace(report, attention=said)
        vars(model).update({REPORT: report, BATCHES: self.batches})
        report.announce()


def _refuse_calibration(where: str, batches: Any, parts: Mapping[str, Request]) -> None:
    """Raise ConfigError unless `calibrate=batches` can be done."""
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
        raise ConfigError(f"{where}.attention.calibrate is {batches!r}; write a number of batches, such as 8")
    if "" not in parts:
        raise ConfigError(f"{where}: calibrate fits one attention of the whole model; leave out enc, dec and stages")
    request = parts[""]
    if request.attention_from != STANDARD:
        raise ConfigError(
            f"{where}: calibrate starts from weights of standard attention; add attention_from='standard'"
        )
    if learned := [part.name for part in request.attention.components if part.learnable]:
        raise ConfigError(
            f"{where}: calibrate runs after Pointcept has made its optimizer, which would miss the parameters of "
            f"'{learned[0]}'; call quest_core.calibrate in a script of your own, or leave calibrate out"
        )
    if request.attention.initial_norms:
        raise ConfigError(f"{where}: calibrate sets the norm of the queries; leave out init and key_init")
    refuse_uncalibratable(request.attention)


def build(adapter: Adapter, stock: Stock, self: Any, *arguments: Any, **options: Any) -> None:
    """Build a stock model, then replace its attention if `options` ask for another one.

    flash-attn is not required, because the attention is replaced, so the stock model is built without it.
    """
    name = type(self).__name__
    asked = Asked.read(options, name)
    options = {name: value for name, value in options.items() if name not in KEYS}
    if asked is None:
        return stock(self, *arguments, **options)
    given = inspect.signature(stock).bind(self, *arguments, **options)
    given.apply_defaults()
    stages = next((len(given.arguments[key]) for key in DEPTHS if key in given.arguments), 0)
    if "" not in asked.parts and not ("enc" in asked.parts or len(asked.parts) == stages):
        raise ConfigError(f"{name}.attention.stages has {len(asked.parts)} entries; the model has {stages} stages")
    packed = {key: given.arguments[key] for key in FLASH if key in given.arguments}
    given.arguments.update(dict.fromkeys(packed, False))
    stock(*given.args, **given.kwargs)
    for site in adapter.sites(self):
        if not ("use_flash_attn" in packed and hasattr(site.module, "rpe")):  # whose own class turns it off
            vars(site.module).update(packed)
    asked.apply(self, adapter, stages)


BATCHES = "calibration_batches"
"""The attribute of a model of Pointcept that says with how many batches its attention is calibrated."""


def calibrate_what_was_loaded(adapter: Adapter, stock: Stock, hook: Any) -> None:
    """Load a checkpoint before training, then calibrate the attention if its config asks for that."""
    stock(hook)
    trainer, cfg = hook.trainer, hook.trainer.cfg
    model = getattr(trainer.model, "module", trainer.model)  # of DistributedDataParallel
    batches = max(vars(part).get(BATCHES, 0) for part in model.modules())
    if not batches or cfg.resume or not os.path.isfile(cfg.weight or ""):
        return
    attention = next(part.config for part in model.modules() if isinstance(part, Mechanism))
    device = next(model.parameters()).device
    seen = [
        {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
        for batch in itertools.islice(trainer.train_loader, batches)
    ]
    inject(model, STANDARD, adapter=adapter)
    _, report = calibrate(model, seen, attention, adapter=adapter, forward=lambda model, batch: model(dict(batch)))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for parameter in model.parameters():  # each process has seen other batches
            torch.distributed.broadcast(parameter.data, 0)
    say(str(report))


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
    """Fill a Config, and refuse an attention that is wrong or does not fit before a run's files are written."""
    from pointcept.models.builder import MODELS as registry

    stock(self, *arguments, **options)
    check(self._cfg_dict, registry)


def merge(stock: Stock, self: Any, options: Mapping[str, Any], *rest: Any, **more: Any) -> None:
    """Merge the options of a command line, also those of an attention that the file writes as a text; then check."""
    check_when_filled(stock, self, open_texts(self._cfg_dict, options), *rest, **more)


def check(config: Mapping[str, Any], models: Any) -> None:
    """Raise if `config` asks for an attention that is misspelt, that no model reads, or that its model cannot have.

    Args:
        config: a whole configuration; the model is under "model".
        models: Pointcept's registry of models.

    Raises:
        ConfigError: it is misspelt or misplaced, or its key/value heads or stages do not fit the model.
        UnsupportedError: the model cannot have it.
    """
    for path, section in sections(config):
        kind = section.get("type")
        model = models.get(kind) if isinstance(kind, str) else kind
        if kind in POINTCEPT_MODELS and model is not None:
            asked = Asked.read(section, path, section.keys() - inspect.signature(model).parameters - {"type"})
            if asked is not None:
                options = {key: value for key, value in section.items() if key != "type"}
                rehearse(functools.partial(model, **options))
            continue
        if model is None and (kind is not None or path.startswith("model.")):
            continue  # another registry's, or options that a model passes on
        for key in ("attention", "attention_from"):
            if section.get(key) is not None and (model is None or key not in inspect.signature(model).parameters):
                raise ConfigError(
                    f"{path + '.' if path else ''}{key}={section[key]!r} is not read by {kind or 'Pointcept'}; write "
                    f"it into the backbone of type {', '.join(POINTCEPT_MODELS)}, as in model.backbone.{key}"
                )


def reduce(config: Any) -> tuple[Any, ...]:
    """Pickle a Config so that the process that reads it imports this plugin.

    Pointcept's launcher hands the Config to one process for each GPU. They never read the file, so `custom_imports`
    does not run there. The Config is rebuilt by a function of this package.
    """
    return _rebuild, (type(config),), config.__getstate__()


def _rebuild(kind: Any) -> Any:
    return kind.__new__(kind)
