"""quest_transformer_lm, quest_roberta, ...: each of fairseq's models with `attention` as an option.

fairseq builds a model, then its attention is replaced. The random state is that of the stock model, so a seeded run
with ``attention: standard`` repeats the stock one.
"""

import functools
from argparse import ArgumentParser
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import fairseq.examples.truncated_bptt.transformer_xl_model  # noqa: F401  registers transformer_xl
from fairseq import models as host
from fairseq.dataclass.utils import gen_parser_from_dataclass
from hydra.core.config_store import ConfigStore
from torch import nn

from .config import Options, read

PREFIX = "quest_"
BUILDS: "ContextVar[Build | None]" = ContextVar("BUILDS", default=None)


@dataclass
class Build:
    """A model that fairseq is building, into whose parts it may load checkpoints."""

    inject_asked: Callable[[nn.Module], None]  # into a part that is about to be loaded
    loaded: bool = False  # a checkpoint was read for something else than such a part


class WithAttention:
    """A fairseq model whose options name its attention."""

    inject_asked: ClassVar[Callable[..., None]]

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's options and ours. A model with a dataclass has both in it."""
        super().add_args(parser)  # type: ignore[misc]
        if getattr(cls, "__dataclass", None) is None:
            gen_parser_from_dataclass(parser, Options())

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build fairseq's model, replace its attention and report it; raises as `read` and `inject`."""
        asked = read(args)  # before fairseq builds anything
        build = Build(functools.partial(cls.inject_asked, asked, part=True))
        outer = BUILDS.set(build)
        try:
            model = super().build_model(args, task)  # type: ignore[misc]
        finally:
            BUILDS.reset(outer)
        cls.inject_asked(asked, model, fresh=not build.loaded)
        return model


def load_part(stock: Callable[..., Any], component: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Load a pretrained encoder or decoder, into which the attention of the model has been put before."""
    build = BUILDS.get()
    if build is None:
        return stock(component, *arguments, **options)
    build.inject_asked(component)
    before = build.loaded
    loaded = stock(component, *arguments, **options)  # reads the checkpoint, which sets build.loaded
    build.loaded = before
    return loaded


def register(inject_asked: Callable[..., None]) -> None:
    """Register a model for each of fairseq's, and a preset for each preset, of the same name behind `PREFIX`."""
    for stock, kind in [*host.MODEL_REGISTRY.items()]:
        if not kind.__module__.startswith(("fairseq.models.", "fairseq.examples.")):
            continue  # of the user, or parallel in a way that needs other attention
        body = {"inject_asked": staticmethod(inject_asked), "__module__": __name__}
        ours = type(f"Quest{kind.__name__}", (WithAttention, kind), body)
        options = getattr(kind, "__dataclass", None)
        if options is not None:
            named = {"__module__": __name__, "__doc__": f"The options of {stock}, and the attention."}
            options = dataclass(type(f"Quest{options.__name__}", (Options, options), named))
        host.register_model(f"{PREFIX}{stock}", dataclass=options)(ours)
        for preset in host.ARCH_MODEL_INV_REGISTRY.get(stock, ()):
            name, apply = f"{PREFIX}{preset}", functools.partial(_apply, host.ARCH_CONFIG_REGISTRY[preset])
            if name not in host.ARCH_MODEL_REGISTRY:  # a model with a dataclass is its own first preset
                host.register_model_architecture(f"{PREFIX}{stock}", name)(apply)
            host.ARCH_CONFIG_REGISTRY[name] = apply


def _apply(preset: Callable[[Any], None], options: Any) -> None:
    """Apply a preset, which fairseq does while it reads the command line, and check the attention."""
    preset(options)
    read(options)


def unregister() -> None:
    """Remove what `register` has registered."""
    registries = [value for name, value in vars(host).items() if name.endswith("_REGISTRY")]
    for registry in (*registries, ConfigStore.instance().repo["model"]):
        for name in [name for name in registry if name.startswith(PREFIX)]:
            del registry[name]
