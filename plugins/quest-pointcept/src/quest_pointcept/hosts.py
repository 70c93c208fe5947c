"""How the configuration systems of the hosts learn `attention`.

Model classes are wrapped in place: their constructor builds the stock model, then injects. Pointcept's registry, its
configs, the models that hold a backbone and torch-pointcloud's `create_model` all pass through the constructor.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.util
import inspect
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from quest_core.checkpoints import built_attentions, trained_attentions
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError, PluginError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.discovery import require_host
from quest_core.hosts.injection import inject
from quest_core.mechanism import AttentionMismatchWarning

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

FLASH = ("enable_flash", "use_flash_attn")
"""What the hosts call the option that asks for flash-attn."""

UNFUSED = ("enable_rpe", "upcast_attention", "upcast_softmax", "upcast_attn")
"""Options that the hosts refuse beside it."""


def install(adapter: Adapter) -> None:
    """Wrap the models of every host that can be imported.

    Raises:
        PluginError: there is none, or the one there cannot be used.
    """
    pointcept = importlib.util.find_spec("pointcept") is not None
    torch_pointcloud = importlib.util.find_spec("torch_pointcloud") is not None
    require_host(adapter.name)
    if pointcept:
        _install_pointcept(adapter)
    if torch_pointcloud:
        for module, names in TORCH_POINTCLOUD_MODELS.items():
            for name in names:
                accept(getattr(importlib.import_module(module), name), adapter)


def _install_pointcept(adapter: Adapter) -> None:
    try:
        from pointcept.engines.hooks.misc import CheckpointLoader
        from pointcept.engines.test import TesterBase
        from pointcept.models.builder import MODELS
        from pointcept.utils.config import Config

        importlib.import_module("pointcept.models")  # fills the registry
    except ImportError as error:
        found = importlib.util.find_spec("pointcept")
        where = Path(found.origin).parent if found and found.origin else "the checkout"
        raise PluginError(
            f"Pointcept at {where} cannot be imported: {error}; install what its README asks for, or take it off "
            "PYTHONPATH"
        ) from error
    for name in POINTCEPT_MODELS:
        model = MODELS.get(name)
        if model is not None:  # an older checkout has fewer
            accept(model, adapter)
    carry_to_children(Config)
    guard_checkpoints(CheckpointLoader)
    guard_tests(TesterBase)
    for model in MODELS.module_dict.values():
        guard_backbones(model)


# --- models ---------------------------------------------------------------------------------------------------------


def accept(model: type[Any], adapter: Adapter) -> None:
    """Let the constructor of a model class take `attention`, in place, once."""
    stock: Any = model.__init__
    if hasattr(stock, "accepts_attention"):
        return
    signature = inspect.signature(stock)
    (flash,) = [name for name in FLASH if name in signature.parameters]

    @functools.wraps(stock)
    def __init__(self: Any, *arguments: Any, attention: AttentionSpec | None = None, **options: Any) -> None:
        if attention is None:
            stock(self, *arguments, **options)
            return
        config = AttentionConfig.parse(attention)  # a misspelt name is refused before the model is built
        given = signature.bind(self, *arguments, **options)
        given.apply_defaults()
        packed = bool(given.arguments[flash])
        if packed:
            for name in UNFUSED:
                if given.arguments.get(name) or (name == "enable_rpe" and given.arguments.get("attn_kind") == "rpe"):
                    shown = f"{name}=True" if given.arguments.get(name) else "attn_kind='rpe'"
                    raise ConfigError(f"{model.__name__}: {shown} needs {flash}=False, for it has no fused kernel")
            given.arguments[flash] = False  # flash-attn need not be there: the attention is replaced
        stock(*given.args, **given.kwargs)
        if packed:
            for site in adapter.sites(self):
                setattr(site.module, flash, True)
        _, report = inject(self, config, adapter=adapter, fresh=True)
        report.announce()

    keyword = inspect.Parameter("attention", inspect.Parameter.KEYWORD_ONLY, default=None)
    known = list(signature.parameters.values())
    end = len(known) - (1 if known and known[-1].kind is inspect.Parameter.VAR_KEYWORD else 0)
    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*known[:end], keyword, *known[end:]]
    )
    __init__.accepts_attention = True  # type: ignore[attr-defined]
    model.__init__ = __init__


# --- child processes ------------------------------------------------------------------------------------------------


def carry_to_children(config: type[Any]) -> None:
    """Let a process that unpickles a `config` know this plugin.

    Pointcept's launcher hands the Config to one process for each GPU. They never read the file, so `custom_imports`
    does not run there. What rebuilds the Config is a function of this package, and finding it imports the package.
    """
    copyreg.pickle(config, _reduce)  # type: ignore[arg-type]


def _reduce(config: Any) -> tuple[Any, ...]:
    return _rebuild, (type(config),), config.__getstate__()


def _rebuild(kind: type[Any]) -> Any:
    made: Any = object.__new__(kind)
    return made


# --- checkpoints ----------------------------------------------------------------------------------------------------


def guard_checkpoints(loader: type[Any]) -> None:
    """Let Pointcept's CheckpointLoader notice a checkpoint of another attention, in place, once.

    It copies weights into a mapping of its own, which loses what a state dict says about itself, and it loads them
    without insisting on every key.
    """
    stock = loader.before_train
    if hasattr(stock, "compares_attention"):
        return

    @functools.wraps(stock)
    def before_train(self: Any) -> None:
        cfg = self.trainer.cfg
        if cfg.weight and Path(cfg.weight).is_file():
            compare_attention(Path(cfg.weight), self.trainer.model, "resume" if cfg.resume else "start")
        stock(self)

    before_train.compares_attention = True  # type: ignore[attr-defined]
    loader.before_train = before_train


def guard_tests(tester: type[Any]) -> None:
    """Let Pointcept's tools/test.py refuse a checkpoint of another attention, in place, once.

    It copies weights as CheckpointLoader does. Those of standard fit quest, and the scores would be nobody's.
    """
    stock = tester.build_model
    if hasattr(stock, "compares_attention"):
        return

    @functools.wraps(stock)
    def build_model(self: Any) -> nn.Module:
        model: nn.Module = stock(self)
        compare_attention(Path(self.cfg.weight), model, "test")
        return model

    build_model.compares_attention = True  # type: ignore[attr-defined]
    tester.build_model = build_model


def guard_backbones(model: type[Any]) -> None:
    """Let a model of Pointcept that starts its own backbone from a checkpoint notice another attention, in place, once.

    The segmentor with LoRA does it in `backbone_load`, pretrainings that go on from Sonata in `load_sonata`.
    """
    own, other = vars(model).get("backbone_load"), vars(model).get("load_sonata")
    if own is not None and not hasattr(own, "compares_attention"):

        @functools.wraps(own)
        def backbone_load(self: Any, checkpoint: dict[str, Any]) -> None:
            _compare("backbone_path", checkpoint, self.backbone, "start")
            own(self, checkpoint)

        backbone_load.compares_attention = True  # type: ignore[attr-defined]
        model.backbone_load = backbone_load
    if other is not None and not hasattr(other, "compares_attention"):

        @functools.wraps(other)
        def load_sonata(self: Any, model: nn.Module, path: str, *arguments: Any, **options: Any) -> Any:
            compare_attention(Path(path), model, "start")
            return other(self, model, path, *arguments, **options)

        load_sonata.compares_attention = True  # type: ignore[attr-defined]
        model.load_sonata = load_sonata


def compare_attention(path: Path, model: nn.Module, use: Literal["start", "resume", "test"]) -> None:
    """Refuse a checkpoint whose attention is not that of the model; one that is only a start brings a warning.

    Raises:
        ConfigError: when resuming or testing, naming both.
    """
    # Mapped, not read, where the format allows it: only what it says about itself is of interest.
    checkpoint = torch.load(path, map_location="cpu", weights_only=False, mmap=zipfile.is_zipfile(path))
    _compare(str(path), checkpoint, model, use)


def _compare(
    name: str, checkpoint: Mapping[str, Any], model: nn.Module, use: Literal["start", "resume", "test"]
) -> None:
    weights = checkpoint.get("state_dict", checkpoint)
    says = trained_attentions(weights)
    trained, built = set((says or {}).values()), list(built_attentions(model).values())
    if not trained and built and (use == "resume" or (use == "test" and says is not None)):
        trained = {"standard"}  # a stock model says nothing about its attention; copied weights say nothing at all
    if not trained or (built and all(config.means(text) for config in built for text in trained)):
        return
    if not built and trained == {"standard"}:
        return
    text, now = " and ".join(sorted(trained)), str(built[0]) if built else "standard"
    if use == "start":
        warnings.warn(
            f"{name} was trained with attention '{text}' and is loaded into '{now}'",
            AttentionMismatchWarning,
            stacklevel=4,
        )
        return
    otherwise = ", or load it as a start with resume=False" if use == "resume" else ""
    raise ConfigError(
        f"{name} was trained with attention '{text}' and the model has '{now}'; {use} with "
        f"model.backbone.attention='{text}'{otherwise}"
    )
