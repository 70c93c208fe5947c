"""The options of the models: `attention`, that of a part, `attention_from` and `allow_partial`.

This file is without ``from __future__ import annotations`` because fairseq reads the types of a dataclass's fields as
objects.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairseq import models
from fairseq.dataclass import FairseqDataclass
from omegaconf import DictConfig, OmegaConf

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Capabilities, refusal
from quest_core.mechanism import count_kv_heads

PARTS = ("encoder", "decoder", "cross")
"""Self-attention of an encoder, self-attention of a decoder, and a decoder's attention over the encoder's tokens."""


@dataclass
class Options(FairseqDataclass):
    """Options of the models in addition to fairseq's."""

    attention: Any = field(
        default="quest", metadata={"help": "a name (quest), a text ('quest+gqa(kv_heads=4)') or a mapping"}
    )
    attention_encoder: Any = field(default=None, metadata={"help": "another of the encoder"})
    attention_decoder: Any = field(default=None, metadata={"help": "another of the decoder's own tokens"})
    attention_cross: Any = field(default=None, metadata={"help": "another of the decoder over the encoder's tokens"})
    attention_from: Any = field(default=None, metadata={"help": "what the loaded checkpoint was trained with"})
    allow_partial: bool = field(
        default=False, metadata={"help": "go on where other attention stays that no adapter knows"}
    )
    watch_attention: int = field(
        default=0, metadata={"help": "log what the attention of every layer does at every n-th update (0: at none)"}
    )
    qk_clip: float = field(
        default=0, metadata={"help": "scale queries down whose logits exceed this in an update (0: never)"}
    )


OPTIONS = ("attention", *(f"attention_{part}" for part in PARTS), "attention_from")


@dataclass(frozen=True)
class Asked:
    """What a model's options ask for: the attention of each part, those named by options of their own, the rest."""

    of: dict[str, AttentionConfig]
    named: tuple[str, ...]
    trained: AttentionConfig | None
    allow_partial: bool


def parse(attention: Any) -> AttentionConfig:
    """Return the value of an option as a configuration. A yaml file's mapping or list arrives in omegaconf's types."""
    return AttentionConfig.parse(OmegaConf.to_container(attention) if OmegaConf.is_config(attention) else attention)


def read(options: Any) -> Asked:
    """Return what a model's options say about attention.

    aft-full and aft-local learn as many positions as the model has, unless `max_length` is given.

    Raises:
        ConfigError: unknown mechanism or option, one that compares layers where LayerDrop leaves some out, key/value
            heads that do not fit, an option of a part that the model does not have, or a negative number.
        UnsupportedError: a part of the model cannot have it.
    """
    for name in ("watch_attention", "qk_clip"):
        if (value := getattr(options, name, 0)) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected a positive number, or 0 to turn it off")
    names = ("max_source_positions", "max_target_positions", "max_positions")
    lengths = [x for x in (getattr(options, name, None) for name in names) if isinstance(x, int)]
    positions = max(lengths, default=0) or getattr(options, "tokens_per_sample", 1024)

    def with_positions(attention: Any) -> AttentionConfig:
        config = parse(attention)
        learns = any(option.name == "max_length" for part in config.components for option in part.options)
        return AttentionConfig.parse({"max_length": positions, **config.to_dict()}) if learns else config

    everywhere = with_positions(getattr(options, "attention", "quest"))
    own = {part: getattr(options, f"attention_{part}", None) for part in PARTS}
    named = tuple(part for part in PARTS if own[part] is not None)
    of = {part: with_positions(own[part]) if part in named else everywhere for part in PARTS}
    given = options if isinstance(options, DictConfig) else vars(options)
    for name in [name for name in given if name.endswith("layerdrop") and (given[name] or 0) > 0]:
        dropped = [of[part] for part in PARTS if part in name or name == "layerdrop"]
        for config in dropped:
            if any(component.chained for component in config.components):
                raise ConfigError(
                    f"attention '{config}' compares each layer with the one before it, and {name}={given[name]} leaves "
                    f"layers out at random; set {name} to 0 (--{name.replace('_', '-')} 0), or choose another attention"
                )
    trained = getattr(options, "attention_from", None)
    partial = bool(getattr(options, "allow_partial", False))
    asked = Asked(of, named, None if trained is None else with_positions(trained), partial)
    _refuse(asked, options)
    return asked


def _refuse(asked: Asked, options: Any) -> None:
    """Raise what the options of a model show that its parts cannot have, before a task reads its data."""
    name: Any = getattr(options, "_name", None) or getattr(options, "arch", None)
    kind: Any = models.ARCH_MODEL_REGISTRY.get(name) or models.MODEL_REGISTRY.get(name)
    if kind is None:  # the options of a model that is built without a name: its parts are seen when it stands
        return
    single = {models.FairseqLanguageModel: "decoder", models.FairseqEncoderModel: "encoder"}
    found = {part for base, part in single.items() if issubclass(kind, base)} or {*PARTS}
    refuse_missing(asked, found, name)
    for part in sorted(found):
        heads = getattr(options, f"{'encoder' if part == 'encoder' else 'decoder'}_attention_heads", 0)
        dropout = (getattr(options, "attention_dropout", 0) or 0) > 0
        needs = Capabilities(causal=part != "encoder", cached=part == "decoder", cross=part == "cross", dropout=dropout)
        if not heads:
            continue
        if why := refusal(asked.of[part], needs):
            raise UnsupportedError(f"attention '{asked.of[part]}' cannot be the {part} attention of {name}: {why}")
        count_kv_heads(asked.of[part], heads)


def refuse_missing(asked: Asked, found: Collection[str], kind: str) -> None:
    """Raise ConfigError if an option names a part that a model of the class `kind` does not have."""
    for name in asked.named:
        if name not in found:
            has = " and ".join(sorted(found)) or "no"
            raise ConfigError(
                f"--attention-{name} (yaml: attention_{name}) is given, and {kind} has {has} attention; leave the "
                "option out"
            )


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
