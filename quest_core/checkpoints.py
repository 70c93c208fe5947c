"""What a checkpoint says of its attention, layer by layer, for those who must compare before a weight is loaded.

The state dict of a mechanism carries its name as metadata. Weights of one mechanism load into another without an error,
so a host that resumes or evaluates by itself has to look first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from .config import AttentionConfig
from .mechanisms.mechanism import Mechanism, plain_path


class Difference(NamedTuple):
    """A layer whose attention in the model is not the one that it was trained with.

    Attributes:
        path: of the mechanism, without the names that wrappers add.
        built: what the model has.
        trained: what the checkpoint says.
    """

    path: str
    built: AttentionConfig
    trained: str


def trained_attentions(state_dict: Mapping[str, Any]) -> dict[str, str] | None:
    """{path of a mechanism: its attention as text}; None for weights without metadata, which somebody copied."""
    metadata = getattr(state_dict, "_metadata", None)
    if not metadata:
        return None
    return {plain_path(path): entry["attention"] for path, entry in metadata.items() if "attention" in entry}


def built_attentions(model: nn.Module) -> dict[str, AttentionConfig]:
    """{path of a mechanism: its attention}, of a model that may be wrapped; a shared layer stands under each path."""
    return {
        plain_path(path): module.config
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Mechanism)
    }


def differences(model: nn.Module, state_dict: Mapping[str, Any]) -> list[Difference] | None:
    """The layers of `model` that a checkpoint was trained with another attention for; None where it does not say.

    A layer of a host's own says nothing and is `standard`, in the model as in the checkpoint.
    """
    trained = trained_attentions(state_dict)
    if trained is None:
        return None
    built, standard = built_attentions(model), AttentionConfig.parse("standard")
    found = (
        Difference(path, built.get(path, standard), trained.get(path, "standard")) for path in {**trained, **built}
    )
    return [layer for layer in found if not layer.built.means(layer.trained)]
