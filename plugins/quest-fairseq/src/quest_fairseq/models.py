"""quest_transformer_lm and quest_transformer: fairseq's models, presets included, with `attention` as an option.

A model is built by fairseq, then injected; the random state is that of the stock model, so a seeded run with
``attention: standard`` repeats the stock one.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

from quest_core import inject
from quest_core.config import AttentionConfig
from quest_core.errors import InjectionError

from .adapter import FairseqAdapter
from .checkpoints import Remembers, sized
from .config import ATTENTION, ATTENTION_FROM, QuestTransformerLanguageModelConfig


class QuestTransformerLanguageModel(Remembers, TransformerLanguageModel):
    """A decoder without an encoder, for the task language_modeling."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> QuestTransformerLanguageModel:
        """See fairseq's; raises ConfigError or UnsupportedError for an attention that cannot be had."""
        positions = args.max_target_positions or args.tokens_per_sample
        config = sized(args.attention, positions)
        return with_attention(super().build_model(args, task), config, args.attention_from, positions)


class QuestTransformerModel(Remembers, TransformerModel):
    """Encoder and decoder, for translation; the attention is that of encoder, decoder and between them."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """See fairseq's."""
        super().add_args(parser)
        parser.add_argument("--attention", default="quest", help=ATTENTION)
        parser.add_argument("--attention-from", default=None, help=ATTENTION_FROM)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> QuestTransformerModel:
        """See fairseq's; raises ConfigError or UnsupportedError for an attention that cannot be had."""
        lengths = [getattr(args, f"max_{side}_positions", None) or 1024 for side in ("source", "target")]
        config = sized(args.attention, max(lengths))
        model = super().build_model(args, task)
        return with_attention(model, config, args.attention_from, max(lengths))


def with_attention(model: Any, config: AttentionConfig, attention_from: str | None, positions: int) -> Any:
    """`model`, freshly built, with another attention inside; the report is printed and kept."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InjectionError(
            "--ddp-backend fully_sharded shards every layer while the model is built, before its attention can be "
            "replaced; use --ddp-backend legacy_ddp or pytorch_ddp"
        )
    if attention_from:
        AttentionConfig.parse(attention_from)  # now, and not when a checkpoint is read that may come much later
    model, report = inject(model, config, adapter=FairseqAdapter(), fresh=True)
    report.announce()
    model.attention_from, model.positions = attention_from, positions
    return model


def install() -> None:
    """Register the models and, for each preset of the stock model, one of the same name behind ``quest_``."""
    if "quest_transformer_lm" in MODEL_REGISTRY:
        return
    register_model("quest_transformer_lm", dataclass=QuestTransformerLanguageModelConfig)(QuestTransformerLanguageModel)
    register_model("quest_transformer")(QuestTransformerModel)
    for stock in ("transformer_lm", "transformer"):
        for preset in ARCH_MODEL_INV_REGISTRY[stock]:
            if f"quest_{preset}" not in ARCH_MODEL_REGISTRY:  # a model with a dataclass is its own first preset
                register_model_architecture(f"quest_{stock}", f"quest_{preset}")(ARCH_CONFIG_REGISTRY[preset])
