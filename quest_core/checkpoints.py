"""Which attention a checkpoint was trained with, carried by the checkpoint as a tensor.

Weights of one mechanism load into another without an error, and a state dict's metadata is lost by every loader that
copies it. So every mechanism other than `standard` has one buffer: its configuration as text, spelled in float32.
Averaging, moving averages, casts, safetensors, ``weights_only`` and sharding keep it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import STANDARD, AttentionConfig, AttentionSpec
from .errors import CheckpointError
from .notices import LOGGER, is_heard

ENTRY = "attention_is_not_standard"
"""The buffer's name, which explains itself where PyTorch reports it as an unexpected key."""
BLOCK = 64  # the spelled text is filled with zeros to a multiple of this, so that most configurations have one shape

_warned: list[object] = [None]  # the latest load that was warned about


class AttentionMismatchWarning(UserWarning):
    """A checkpoint of standard attention is loaded into a model with another one."""


def spell(config: AttentionConfig) -> Tensor:
    """Return the text of `config` as the bytes of UTF-8, float32 [L] on the CPU."""
    text = str(config).encode()
    return torch.tensor([*text, *[0] * (-len(text) % BLOCK)], dtype=torch.float32, device="cpu")


def read(spelled: Tensor) -> str:
    """Return the text that `spell` wrote; averaging and casts may have rounded it, NaN is an error."""
    if not spelled.isfinite().all():
        raise CheckpointError(
            f"a checkpoint's '{ENTRY}' holds NaN or infinity, so the attention that it was trained with is unknown; "
            "replace this entry by that of a model with the same attention"
        )
    return bytes(round(code) & 255 for code in spelled.flatten().tolist()).rstrip(b"\0").decode(errors="replace")


def compare(
    spelled: Tensor | None, config: AttentionConfig, attention_from: AttentionConfig | None, path: str, load: object
) -> bool:
    """Return whether a checkpoint was trained with the attention that the model has; raise or warn if it was not.

    Args:
        spelled: the checkpoint's entry; None where it has none, which means standard attention.
        config: the model's attention.
        attention_from: the checkpoint's attention, if the user has named it.
        path: of the layer.
        load: an object that is the same for all layers of one call of load_state_dict; it warns once.

    Raises:
        CheckpointError: the checkpoint says another attention than `config` and `attention_from`.
    """
    trained = str(STANDARD) if spelled is None else read(spelled)
    if config.means(trained):
        return True
    if attention_from is not None and attention_from.means(trained):
        return False
    said = "" if attention_from is None else f" (attention_from is '{attention_from}')"
    if spelled is not None or attention_from is not None:
        raise CheckpointError(
            f"'{path}': this checkpoint was trained with attention '{trained}', and the model has '{config}'{said}; "
            f"build the model with attention='{trained}', or say attention_from='{trained}' if you mean to go on from "
            "these weights with another attention"
        )
    if _warned[0] is not load:
        _warned[0] = load
        message = (
            f"these weights were trained with standard attention and are loaded into attention '{config}'; fine-tune "
            "them, and say attention_from='standard' if you mean to"
        )
        warnings.warn(message, AttentionMismatchWarning, stacklevel=2)
        if is_heard(logging.WARNING):
            LOGGER.warning(message)
    return False


def unread(key: str, spelled: Tensor, host: str) -> str:
    """Return the message for an entry of a checkpoint where the model has the attention of `host` itself."""
    trained = read(spelled)
    return (
        f"'{key}': this checkpoint was trained with attention '{trained}', and the model has {host}'s own; build the "
        f"model with attention='{trained}', or with attention='standard' and attention_from='{trained}' if you mean to "
        "go on from these weights with standard attention"
    )


class Spelled(nn.Module):
    """A module whose state dict spells its attention, and which refuses a checkpoint of another."""

    attention_is_not_standard: Tensor | None  # the configuration, spelled; None for `standard`
    attention_from: AttentionConfig | None  # of a checkpoint to be loaded, where it is meant to differ
    start_is_due: bool  # the attention sets the norms that queries or keys start with, and nothing has set them yet

    def __init__(self, config: AttentionConfig, *, keeps: bool) -> None:
        """Spell `config` in a buffer.

        Args:
            config: the attention.
            keeps: whether it adds anything to a state dict.
        """
        super().__init__()
        self.config = config
        self.is_standard = config.is_standard
        self.register_buffer(ENTRY, spell(config) if keeps and not self.is_standard else None)
        self.attention_from = None
        self.start_is_due = keeps and bool(config.starts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Spelled:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.attention_is_not_standard is not None:  # `to_empty` has left nothing of the text
            self.attention_is_not_standard = spell(self.config).to(self.attention_is_not_standard.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        own, key = self.attention_is_not_standard, prefix + ENTRY
        missing_keys = arguments[2]  # PyTorch hands one list of them to all modules of a call
        spelled = state_dict.pop(key, None)
        if spelled is own and not missing_keys:  # set_model_state_dict(full_state_dict=True) has filled in all it lacks
            spelled = None
        if own is not None and own.is_meta:  # load_state_dict(assign=True) makes the model of the state dict's tensors
            own = spell(self.config).to(next((x.device for x in state_dict.values() if isinstance(x, Tensor)), "cpu"))
        self.start_is_due = self.start_is_due and spelled is None  # trained weights have started
        silent = spelled is None and _holds_no_weights(prefix[: prefix[:-1].rfind(".") + 1], state_dict, missing_keys)
        if not (silent or compare(spelled, self.config, self.attention_from, prefix[:-1], missing_keys)):
            # Another attention, accepted: what this one learns and the checkpoint lacks stays as it was initialized.
            mine = self.state_dict(prefix=prefix)
            given = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
            shared = {name: x for name, x in given.items() if name in mine and x.shape == mine[name].shape}
            state_dict.update({name: x for name, x in mine.items() if not x.is_meta} | shared)
        if own is not None:
            state_dict[key] = own
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _holds_no_weights(start: str, state_dict: dict[str, Any], missing_keys: list[str]) -> bool:
    """Return whether a state dict lacks the weights of a layer, below `start`: one of LoRA adapters or of a head."""
    held, missing = (
        {key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)}
        for keys in (state_dict, [key for key in missing_keys if key.endswith("weight")])
    )
    return bool(missing) and held <= missing


def accept(model: nn.Module, attention_from: AttentionSpec) -> None:
    """Let a model go on from weights that were trained with another attention, without an error or a warning.

    Args:
        model: with quest_core attention in it.
        attention_from: the attention of the weights; "standard" for those of the host.
    """
    config = AttentionConfig.parse(attention_from)
    for module in model.modules():
        if isinstance(module, Spelled):
            module.attention_from = config


def started(model: nn.Module) -> None:
    """Let a model's attention run: its projections have the start that its options ask for, or trained weights."""
    for module in model.modules():
        if isinstance(module, Spelled):
            module.start_is_due = False
