"""convert: a pretrained model from standard attention to quest, calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from quest_core.config import AttentionSpec
from quest_core.tools.calibration import CalibrationReport, calibrate

from .adapter import TransformersAdapter


def convert(model: nn.Module, attention: AttentionSpec, data: Iterable[Any]) -> tuple[nn.Module, CalibrationReport]:
    """Replace the attention of a pretrained model in place, so that fine-tuning starts from nearly what it computed.

    As :func:`quest_core.calibrate`: the mean norm of each head's keys is folded into its query projection.

    >>> model = AutoModelForCausalLM.from_pretrained(path)
    >>> model, report = quest_transformers.convert(model, "quest", batches)
    >>> model.save_pretrained("converted")

    Args:
        model: with the host's own attention, or `standard`.
        attention: "quest", with any normalizer.
        data: a few batches like those of training: mappings of the model's arguments (what a data collator makes), or
            tensors of input ids [B, N].

    Returns:
        The model, and how far its logits moved with and without the factors.

    Raises:
        ConfigError, InputError, UnsupportedError, InjectionError: as quest_core.calibrate.
    """
    return calibrate(model, data, attention, adapter=TransformersAdapter(), forward=_outputs)


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """The logits, or where a model has none the last hidden state."""
    made = model(**batch) if isinstance(batch, Mapping) else model(batch)
    for name in ("logits", "last_hidden_state"):
        if name in made:
            found: Tensor = made[name]
            return found
    raise TypeError(f"{type(model).__name__} returns neither logits nor last_hidden_state, but {list(made)}")
