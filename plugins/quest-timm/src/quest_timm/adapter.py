"""TimmAdapter: where timm's attention is, and how `attention=` reaches it.

Every model of timm is built by `build_model_with_cfg`, which also loads pretrained weights. `install` wraps it in every
module that has imported it, and injects between the construction and the loading.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from timm.layers import _fx
from timm.models import _builder, _factory, get_pretrained_cfg
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.optim import _param_groups
from torch import Tensor, nn

from quest_core.checkpoints import compare, refuse_entries
from quest_core.drafts import host_class
from quest_core.errors import ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, HostAttention, rate, refusal, refuses_chained
from quest_core.hosts.inject import REPORT, inject
from quest_core.hosts.request import KEYS, Request
from quest_core.hosts.sites import FoundSite, within
from quest_core.hosts.torch import TorchAdapter
from quest_core.hosts.universal import Routed
from quest_core.mechanism import Mechanism, has_mechanism

from .layers import REPLACEMENTS, makes_angles, normalizes


class TimmAdapter(Adapter):
    """Adapter for timm's own attention classes."""

    name: ClassVar[str] = "timm"
    leaves_alone: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("ChannelAttn", "CoordAttn", "EfficientLocalAttn", "LightChannelAttn", "LightSpatialAttn"),
            *("SimpleCoordAttn", "SpatialAttn", "SplitAttn", "StripAttn"),
        ),
        "it gates channels or places, without q·k",
    )
    replacements = REPLACEMENTS

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module; None if it repeats key heads, so its call is found in a run."""
        return None if getattr(module, "num_kv_groups", 1) > 1 else super().replacement(module)

    def example(self, model: nn.Module, missed: Collection[str]) -> Callable[[nn.Module], None] | None:
        """Return a run of the models of timm around the modules `missed`, on images of the plugin's own."""
        models = [path for path, part in model.named_modules() if _input_size(part) is not None]
        chosen = [path for path in models if not missed or any(within(one, [path]) for one in missed)]
        outermost = [path for path in chosen if not any(within(path, [other]) for other in chosen if other != path)]
        return functools.partial(_run, outermost, itertools.count()) if outermost else None

    def scale_queries(self, module: nn.Module, factor: Tensor) -> None:
        """Scale the query projection; see `Adapter.scale_queries`.

        Raises:
            UnsupportedError: a norm follows the projection, or timm's own forward is kept.
        """
        if normalizes(module):
            raise UnsupportedError(
                f"{type(module).__name__} normalizes its queries (qk_norm=True), so a factor on them is lost"
            )
        super().scale_queries(module, factor)

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        """Refuse what timm's attention cannot have where a run in evaluation mode has found it.

        Raises:
            UnsupportedError: layers with windows would be compared, queries and keys that are turned by their positions
                do not meet, or weights that are not formed would be dropped.
        """
        turns = makes_angles(model)
        for path, module in model.named_modules():
            made = drafts.get(module)
            if not isinstance(made, FoundSite) or not host_class(module).__module__.startswith("timm."):
                continue
            config, drops = made.mechanism.config, rate(getattr(module, "attn_drop", 0.0)) > 0
            if why := refuses_chained(config) or refusal(config, Capabilities(rotary=turns, dropout=drops)):
                raise UnsupportedError(f"attention '{config}' cannot be used at '{path}' of timm: {why}")

    def change_host(self) -> None:
        """Make `timm.create_model` accept `attention`, `attention_from` and `allow_partial`."""
        change = functools.partial(_build_with_attention, self)
        self.patches.around(_builder, "build_model_with_cfg", change, everywhere=True)
        self.patches.around(_factory, "create_model", _create_with_attention, everywhere=True)
        self.patches.around(_builder, "load_pretrained", _refuse_unexpected, everywhere=True)
        for kind in (NaFlexVit, VisionTransformer):
            self.patches.around(kind, "load_pretrained", _compare_arrays)
        for name in ("param_groups_weight_decay", "param_groups_layer_decay"):
            self.patches.around(_param_groups, name, _decay_no_mechanism, everywhere=True)
        for leaf in (Mechanism, Routed):  # timm's fx graphs call them: their code reads shapes and argument types
            leaves = _fx._leaf_modules
            self.patches.once(leaf, functools.partial(leaves.add, leaf), functools.partial(leaves.discard, leaf))


def _create_with_attention(stock: Callable[..., nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    """Run create_model; refuse a model of a user's own function that took `attention` and did not read it."""
    made = stock(*arguments, **options)
    name = arguments[0] if arguments else options["model_name"]
    if Request.read(options, name) is not None and not has_mechanism(made):
        raise InjectionError(
            f"attention={options['attention']!r} was given to {name!r}, which did not read it; build the model with "
            "timm.models.build_model_with_cfg, or call "
            f"quest_core.inject(model, {options['attention']!r}) after create_model"
        )
    return made


def _build_with_attention(
    adapter: TimmAdapter,
    stock: Callable[..., Any],
    model_cls: Callable[..., nn.Module],
    variant: str,
    pretrained: bool,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Run build_model_with_cfg with `attention`: the model is injected before weights are loaded."""
    request = Request.read(options, variant)
    options = {name: value for name, value in options.items() if name not in KEYS}
    if request is None:
        return stock(model_cls, variant, pretrained, *arguments, **options)
    # timm records the options of a model that is saved, and its weights may have had this start already.
    recorded = (options.get("pretrained_model_args") or {}).get("attention")
    own = recorded is not None and request.attention.means(recorded)
    if pretrained and request.attention.initial_norms and not own:
        raise ConfigError(
            f"{variant}: attention '{request.attention}' sets the norms of fresh projections, and pretrained=True "
            "loads trained ones; leave the option or pretrained out"
        )
    reports = []

    def build(*given: Any, **named: Any) -> nn.Module:
        model = model_cls(*given, **named)
        vars(model)["pretrained_cfg"] = _with_size(variant, named)  # timm puts its own there afterwards
        _, report = inject(model, adapter=[adapter, TorchAdapter()], fresh=True, **vars(request))
        reports.append(report)
        return model

    made = stock(build, variant, pretrained, *arguments, **options)
    setattr(made, REPORT, reports[0])  # features_only has wrapped the model
    reports[0].announce()
    return made


def _with_size(variant: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of timm's configuration of a model that says which images it takes."""
    known = get_pretrained_cfg(variant)
    channels, *size = (3, 224, 224) if known is None else known.input_size
    wanted = options.get("img_size") or size
    height, width = (wanted, wanted) if isinstance(wanted, int) else wanted
    return {"input_size": (options.get("in_chans", channels), height, width)}


def _input_size(part: Any) -> tuple[int, int, int] | None:
    """Return the channels, height and width of the images that a model of timm takes, or None for other modules."""
    cfg = getattr(part, "pretrained_cfg", None)
    if not isinstance(cfg, Mapping) or "input_size" not in cfg:
        return None
    channels, *size = cfg["input_size"]  # of the pretrained weights; the model may be for another one
    height, width = getattr(getattr(part, "patch_embed", None), "img_size", None) or size
    return channels, height, width


def _run(paths: Iterable[str], calls: Iterator[int], model: nn.Module) -> None:
    """Run parts of a model, each of timm, on two images, and each time on others; `inject` restores their modes."""
    for path in paths:
        part = model.get_submodule(path)
        size = _input_size(part) or ()
        draw = torch.Generator().manual_seed(next(calls))
        try:
            images = torch.randn(2, *size, generator=draw).to(next(part.parameters()))
            part.eval()
            part(images)
        except Exception as error:  # whatever a model raises on inputs that do not suit it
            raise InjectionError(
                f"{type(part).__name__} may have attention that only a run of it finds, and does not run on images of "
                f"shape {[2, *size]} ({type(error).__name__}: {error}); say quest_core.inject(model, ..., "
                "example=batch), on a model that was built without attention="
            ) from error


def _decay_no_mechanism(stock: Callable[..., Any], model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Run a function that groups parameters.

    Scales of mechanisms may have two axes; timm would let them decay as matrices, and Muon would orthogonalize them.
    """
    signature = inspect.signature(stock)
    given = signature.bind(model, *arguments, **options)
    learned = {name for name, _ in model.named_parameters() if "mechanism" in name.split(".")}
    for name in {"no_weight_decay_list", "fallback_list"} & {*signature.parameters}:  # the latter in newer timm
        given.arguments[name] = learned.union(given.arguments.get(name, ()))
    return stock(*given.args, **given.kwargs)


def _refuse_unexpected(stock: Callable[..., Any], model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Run load_pretrained, which ignores unexpected keys if the model has another number of classes."""

    def refuse(module: nn.Module, state_dict: Mapping[str, Any], *_: Any) -> None:
        refuse_entries(module, state_dict, "timm")

    handle = model.register_load_state_dict_pre_hook(refuse)
    try:
        return stock(model, *arguments, **options)
    finally:
        handle.remove()


def _compare_arrays(stock: Callable[..., Any], model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Run load_pretrained, which copies the arrays of an npz file one by one: they are of standard attention."""
    load = object()
    for path, module in model.named_modules():
        if isinstance(module, Mechanism):
            compare(None, module.config, module.attention_from, path, load)
    return stock(model, *arguments, **options)
