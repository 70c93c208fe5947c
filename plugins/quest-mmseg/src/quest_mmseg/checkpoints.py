"""What a checkpoint says of its attention, compared before mmengine loads it.

mmengine loads what fits and logs what does not. Weights of one mechanism fit another, so a run that is resumed or
tested with the wrong `attention` would go on as if nothing were wrong. `load_from`, which fine-tunes, only brings a
warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import FlexibleRunner, Runner
from torch import nn

from quest_core import AttentionMismatchWarning
from quest_core.checkpoints import built_attentions, differences
from quest_core.errors import InputError

ADVICE = {
    "resume": "To fine-tune it with another attention, train anew with load_from",
    "test": "Build the model with the attention that the checkpoint was trained with, for example by --cfg-options "
    "model.attention=...",
}
ADVICE["val"] = ADVICE["test"]
PAST = {"resume": "resumed", "test": "tested", "val": "validated"}


def difference(model: nn.Module, state_dict: Mapping[str, Any]) -> str | None:
    """What is wrong with evaluating or going on with a checkpoint, or None.

    Args:
        model: what it would be loaded into.
        state_dict: the weights, whose metadata name the attention of every layer. A layer of mmseg's own names none and
            is `standard`. Weights without any metadata, which somebody copied, cannot be compared: that is warned of.
    """
    found = differences(model, state_dict)
    if found is None:
        for own in list(built_attentions(model).values())[:1]:
            warnings.warn(
                f"this checkpoint does not say with which attention it was trained; it is not compared with the "
                f"model's, '{own}'",
                AttentionMismatchWarning,
                stacklevel=3,
            )
        return None
    for place, own, text in found:
        return f"its {place.removesuffix('.mechanism')} was trained with attention '{text}', and the model has '{own}'"
    return None


class _Compare(Hook):
    """Ends a run whose checkpoint is of another attention, before a weight is loaded."""

    def __init__(self, use: str, path: str | None) -> None:
        self.use, self.path = use, path

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        path = runner._load_from if self.path is None else self.path
        found = difference(runner.model, checkpoint.get("state_dict", checkpoint))
        if found is not None:
            raise InputError(f"{path} cannot be {PAST[self.use]}: {found}. {ADVICE[self.use]}")


def guard() -> None:
    """Wrap what resumes and tests in mmengine's runners, in place, once."""
    for runner in (Runner, FlexibleRunner):
        for use in PAST:
            _guard(runner, use)


def _guard(runner: type[Any], use: str) -> None:
    stock: Any = getattr(runner, use)
    if hasattr(stock, "compares_attention"):
        return

    @functools.wraps(stock)
    def guarded(self: Any, *arguments: Any, **options: Any) -> Any:
        given = (arguments[0] if arguments else options.get("filename")) if use == "resume" else None
        hook = _Compare(use, given)
        self.register_hook(hook, "HIGHEST")
        try:
            return stock(self, *arguments, **options)
        finally:
            self.hooks.remove(hook)

    guarded.compares_attention = True  # type: ignore[attr-defined]
    setattr(runner, use, guarded)
