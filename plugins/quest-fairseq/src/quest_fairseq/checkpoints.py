"""A checkpoint remembers the attention it was trained with, and is refused by a model that has another.

The state dict of a mechanism carries its name as metadata. fairseq's average_checkpoints.py drops metadata, and a
stock checkpoint never had any; what such a file's own configuration says is added when fairseq reads it. The broadcast
by which one process of several hands what it read to the others keeps it.
"""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import DictConfig, OmegaConf

from quest_core import AttentionMismatchWarning, Mechanism
from quest_core.checkpoints import trained_attentions
from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError


def as_spec(attention: Any) -> AttentionSpec:
    """The option as quest_core reads it; a mapping of a yaml file arrives as OmegaConf's."""
    return OmegaConf.to_container(attention) if isinstance(attention, DictConfig) else attention  # type: ignore[return-value]


def sized(attention: Any, positions: int) -> AttentionConfig:
    """The configuration; where positions are learned (aft-full, aft-local), as many as the model has by default."""
    config = AttentionConfig.parse(as_spec(attention))
    learns = any(option.name == "max_length" for part in config.specs() for option in part.options)
    if learns and "max_length" not in dict(config.options):
        return AttentionConfig.parse({**config.to_dict(), "max_length": positions})
    return config


def trained_with(state_dict: Mapping[str, Any]) -> list[str]:
    """The attentions that a state dict says it was trained with, each once."""
    return list(dict.fromkeys((trained_attentions(state_dict) or {}).values()))


def configured(state: Mapping[str, Any]) -> str:
    """The attention that a checkpoint's own configuration asks for; 'standard' for fairseq's own models."""
    cfg = state.get("cfg")
    model = state.get("args") if cfg is None else cfg.get("model")
    attention = getattr(model, "attention", None) if str(_name(model)).startswith("quest_") else None
    return "standard" if attention is None else str(AttentionConfig.parse(as_spec(attention)))


def _name(model: Any) -> Any:
    return getattr(model, "_name", None) or getattr(model, "arch", None)


def install() -> None:
    """Let fairseq's reader of checkpoints add what metadata lacks, and its broadcast keep it. Idempotent."""
    # Models with options in the old manner (translation) store them as a Namespace, and PyTorch 2.6 and later read
    # what they were told is safe alone.
    torch.serialization.add_safe_globals([argparse.Namespace])
    stock = checkpoint_utils.load_checkpoint_to_cpu
    if hasattr(stock, "remembers_attention"):
        return

    def load_checkpoint_to_cpu(
        path: str, arg_overrides: dict[str, Any] | None = None, load_on_all_ranks: bool = False
    ) -> dict[str, Any]:
        state = stock(path, arg_overrides, load_on_all_ranks)
        model = state.get("model")
        if isinstance(model, dict) and not trained_with(model):
            overridden = "attention" in (arg_overrides or {})
            trained = configured(stock(path, None, load_on_all_ranks) if overridden else state)
            if not isinstance(model, OrderedDict):
                state["model"] = model = OrderedDict(model)
            metadata = OrderedDict(getattr(model, "_metadata", {}))
            metadata[""] = {**metadata.get("", {}), "attention": trained}
            model._metadata = metadata  # type: ignore[attr-defined]
        return state  # type: ignore[no-any-return]

    load_checkpoint_to_cpu.remembers_attention = True  # type: ignore[attr-defined]
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu
    _keep_metadata_in_broadcasts()


def _keep_metadata_in_broadcasts() -> None:
    stock = distributed_utils.broadcast_object

    def broadcast_object(obj: Any, src_rank: int, group: Any, dist_device: torch.device | None = None) -> Any:
        model = obj.get("model") if isinstance(obj, dict) else None
        state, metadata = stock((obj, getattr(model, "_metadata", None)), src_rank, group, dist_device)
        if metadata:  # fairseq takes dictionaries apart and hands on plain ones
            state["model"] = OrderedDict(state["model"])
            state["model"]._metadata = OrderedDict(metadata)
        return state

    def broadcast_structure(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
        # fairseq writes and reads a file in memory, and what it holds is not among what PyTorch 2.6 and later read.
        held = [obj]
        torch.distributed.broadcast_object_list(held, src=src_rank, group=group, device=dist_device)
        return held[0]

    distributed_utils.broadcast_object = broadcast_object
    distributed_utils._broadcast_object_slow = broadcast_structure


class Remembers:
    """A fairseq model that refuses a checkpoint of another attention, unless `attention_from` names that one."""

    attention_from: str | None = None
    positions: int

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """See fairseq's; raises ConfigError for a checkpoint that was trained with another attention."""
        own = next(m.config for m in self.modules() if isinstance(m, Mechanism))  # type: ignore[attr-defined]
        for trained in trained_with(state_dict):
            same = [sized(text, self.positions).means(trained) for text in (own, self.attention_from) if text]
            if not (any(same) or own.means(str(sized(trained, self.positions)))):
                raise ConfigError(
                    f"this checkpoint was trained with attention '{trained}', and the model has '{own}'. To go on as "
                    f"trained, say --attention '{trained}'. To start from its weights with another attention, say so: "
                    f"--attention-from '{trained}' (yaml: model.attention_from; fairseq-generate and fairseq-eval-lm: "
                    f"--model-overrides \"{{'attention_from': '{trained}'}}\"); --finetune-from-model begins a new run"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionMismatchWarning)  # what differs here was asked for
            return super().load_state_dict(state_dict, strict, model_cfg, args)  # type: ignore[misc]
