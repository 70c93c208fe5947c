"""quest_transformer_lm, quest_transformer and quest_transformer_xl: fairseq's models with `attention` as an option.

fairseq builds a model, then its attention is replaced. The random state is that of the stock model, so a seeded run
with ``attention: standard`` repeats the stock one.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any

from fairseq import models as host
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from hydra.core.config_store import ConfigStore

from quest_core import inject
from quest_core.errors import InjectionError

from .config import HELP, QuestTransformerLanguageModelConfig, parse, read


class WithAttention:
    """A fairseq model whose options name its attention."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build fairseq's model, replace its attention and report it.

        Raises:
            ConfigError: unknown mechanism or option; raised before fairseq builds anything.
            UnsupportedError: fairseq cannot honour the mechanism.
            InjectionError: the layers are sharded already.
        """
        attention, attention_from = read(args)
        model = super().build_model(args, task)  # type: ignore[misc]
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise InjectionError(
                "--ddp-backend fully_sharded shards every layer while the model is built, before its attention can be "
                "replaced; use --ddp-backend legacy_ddp or pytorch_ddp"
            )
        # By name, because the adapter imports this file.
        model, report = inject(model, attention, adapter="fairseq", fresh=True, attention_from=attention_from)
        report.announce()
        return model


class QuestTransformerLanguageModel(WithAttention, TransformerLanguageModel):
    """A decoder without an encoder, for the task language_modeling."""


class QuestTransformerModel(WithAttention, TransformerModel):
    """Encoder and decoder, for translation. The attention is that of the encoder, the decoder and between them."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """See fairseq's."""
        super().add_args(parser)
        parser.add_argument("--attention", default="quest", help=HELP["attention"])
        parser.add_argument("--attention-from", default=None, help=HELP["attention_from"])


@functools.cache
def _transformer_xl() -> tuple[type, type]:
    """Return the class and the options of quest_transformer_xl. The import registers fairseq's example and its task."""
    from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLConfig, TransformerXLLanguageModel

    model = type("QuestTransformerXLLanguageModel", (WithAttention, TransformerXLLanguageModel), {})
    ours = [each for each in fields(QuestTransformerLanguageModelConfig) if each.name in HELP]
    options = [(each.name, each.type, field(default=each.default, metadata=each.metadata)) for each in ours]
    return model, make_dataclass("QuestTransformerXLConfig", options, bases=(TransformerXLConfig,))


def register() -> None:
    """Register the models and, for each preset of the stock model, one of the same name behind ``quest_``."""
    made: dict[str, tuple[type, type | None]] = {
        "transformer_lm": (QuestTransformerLanguageModel, QuestTransformerLanguageModelConfig),
        "transformer": (QuestTransformerModel, None),
        "transformer_xl": _transformer_xl(),
    }
    for stock, (model, dataclass) in made.items():
        if f"quest_{stock}" not in host.MODEL_REGISTRY:  # fairseq 0.12.2 refuses a second registration
            host.register_model(f"quest_{stock}", dataclass=dataclass)(model)
        for preset in host.ARCH_MODEL_INV_REGISTRY[stock]:
            name, apply = f"quest_{preset}", _checked(host.ARCH_CONFIG_REGISTRY[preset])
            if name not in host.ARCH_MODEL_REGISTRY:  # a model with a dataclass is its own first preset
                host.register_model_architecture(f"quest_{stock}", name)(apply)
            host.ARCH_CONFIG_REGISTRY[name] = apply


def _checked(preset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a preset that checks the attention first: fairseq applies it while it reads the command line."""

    @functools.wraps(preset)
    def apply(options: Any) -> None:
        for given in (getattr(options, name, None) for name in HELP):
            if given is not None:
                parse(given)
        preset(options)

    return apply


def unregister() -> None:
    """Remove what `register` has registered."""
    registries = [value for name, value in vars(host).items() if name.endswith("_REGISTRY")]
    for registry in (*registries, ConfigStore.instance().repo["model"]):
        for name in [name for name in registry if name.startswith("quest_")]:
            del registry[name]
