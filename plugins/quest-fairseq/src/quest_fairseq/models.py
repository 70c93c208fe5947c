"""quest_transformer_lm, quest_transformer and quest_transformer_xl: fairseq's models with `attention` as an option.

fairseq builds a model, then its attention is replaced. The random state is that of the stock model, so a seeded run
with ``attention: standard`` repeats the stock one.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from fairseq import models as host
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLLanguageModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from hydra.core.config_store import ConfigStore

from .config import Options, QuestTransformerLanguageModelConfig, QuestTransformerXLConfig, read


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
        request = read(args)
        model = super().build_model(args, task)  # type: ignore[misc]
        request.apply(model, "fairseq")  # by name, because the adapter imports this file
        return model


class QuestTransformerLanguageModel(WithAttention, TransformerLanguageModel):
    """A decoder without an encoder; the task language_modeling uses it."""


class QuestTransformerXLLanguageModel(WithAttention, TransformerXLLanguageModel):
    """A decoder with a memory and relative positions, as the task truncated_bptt_lm needs it."""


class QuestTransformerModel(WithAttention, TransformerModel):
    """Encoder and decoder, for translation. The attention is that of the encoder, the decoder and between them."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """See fairseq's."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, Options())


MODELS: dict[str, tuple[type, type | None]] = {
    "transformer_lm": (QuestTransformerLanguageModel, QuestTransformerLanguageModelConfig),
    "transformer_xl": (QuestTransformerXLLanguageModel, QuestTransformerXLConfig),
    "transformer": (QuestTransformerModel, None),
}
"""Name of the stock model -> ours and its options; None for options in fairseq's old manner."""


def register() -> None:
    """Register the models and, for each preset of the stock model, one of the same name behind ``quest_``."""
    for stock, (model, options) in MODELS.items():
        host.register_model(f"quest_{stock}", dataclass=options)(model)
        for preset in host.ARCH_MODEL_INV_REGISTRY[stock]:
            name, apply = f"quest_{preset}", functools.partial(_apply, host.ARCH_CONFIG_REGISTRY[preset])
            if name not in host.ARCH_MODEL_REGISTRY:  # a model with a dataclass is its own first preset
                host.register_model_architecture(f"quest_{stock}", name)(apply)
            host.ARCH_CONFIG_REGISTRY[name] = apply


def _apply(preset: Callable[[Any], None], options: Any) -> None:
    """Apply a preset, which fairseq does while it reads the command line, after a check of the attention."""
    read(options)
    preset(options)


def unregister() -> None:
    """Remove what `register` has registered."""
    registries = [value for name, value in vars(host).items() if name.endswith("_REGISTRY")]
    for registry in (*registries, ConfigStore.instance().repo["model"]):
        for name in [name for name in registry if name.startswith("quest_")]:
            del registry[name]
