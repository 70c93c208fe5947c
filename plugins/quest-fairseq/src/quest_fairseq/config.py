"""The options of the models: `attention` and `attention_from`.

This file is without ``from __future__ import annotations`` because fairseq reads the types of a dataclass's fields as
objects.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import DictConfig, OmegaConf

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError
from quest_core.hosts.inject import Request


@dataclass
class Options(FairseqDataclass):
    """Options of the models in addition to fairseq's."""

    attention: Any = field(
        default="quest", metadata={"help": "a name (quest), a text ('quest+gqa(kv_heads=4)') or a mapping"}
    )
    attention_from: Any = field(default=None, metadata={"help": "what the loaded checkpoint was trained with"})


@dataclass
class QuestTransformerLanguageModelConfig(Options, TransformerLanguageModelConfig):
    """fairseq's options of transformer_lm, and the attention."""


@dataclass
class QuestTransformerXLConfig(Options, TransformerXLConfig):
    """The options of transformer_xl in fairseq's examples, and the attention."""


def parse(attention: Any) -> AttentionConfig:
    """Return the value of an option as a configuration. A mapping in a yaml file arrives as a DictConfig.

    Raises:
        ConfigError: unknown mechanism or option.
    """
    return AttentionConfig.parse(OmegaConf.to_container(attention) if isinstance(attention, DictConfig) else attention)


def read(options: Any) -> Request:
    """Return what a model's options say about attention.

    aft-full and aft-local learn as many positions as the model has, unless `max_length` is given.

    Raises:
        ConfigError: unknown mechanism or option.
    """
    lengths = [getattr(options, f"max_{side}_positions", None) or 0 for side in ("source", "target")]
    positions = max(lengths) or getattr(options, "tokens_per_sample", 1024)

    def sized(attention: Any) -> AttentionConfig:
        config = parse(attention)
        learns = any(option.name == "max_length" for part in config.components for option in part.options)
        return AttentionConfig.parse({"max_length": positions, **config.to_dict()}) if learns else config

    trained = getattr(options, "attention_from", None)
    return Request(sized(getattr(options, "attention", "quest")), None if trained is None else sized(trained))


def share(total: int, processes: int, update_freq: Sequence[int]) -> int:
    """Return the batch size of one process if an update is to have `total` sequences; the shipped yamls call it.

    Args:
        total: sequences an update, over all processes.
        processes: fairseq's distributed_world_size; torchrun's WORLD_SIZE comes first if it is set.
        update_freq: batches that are accumulated for an update; one number for all epochs.

    Raises:
        ConfigError: `total` cannot be divided, or accumulation changes from epoch to epoch.
    """
    processes = int(os.environ.get("WORLD_SIZE", processes))
    batches = processes * update_freq[0]
    if total % batches or len(update_freq) > 1:
        possible = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ConfigError(
            f"{total} sequences an update cannot be divided among {processes} processes with update_freq "
            f"{list(update_freq)}, which must be one number; their product may be {possible}; or set "
            "dataset.batch_size and the schedule"
        )
    return total // batches


OmegaConf.register_new_resolver("quest.share", share, replace=True)
