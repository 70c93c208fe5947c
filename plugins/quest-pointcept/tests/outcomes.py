"""Checkpoints and models for the tables of docs/checkpoints.md, and what a door makes of a pair of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quest_core import AttentionMismatchWarning, CheckpointError
from quest_core.checkpoints import ENTRY
from quest_core.testing.matrix import committed, table

ATTENTION = {
    "stock": None,
    "standard": "standard",
    "quest": "quest",
    "gqa": "quest+gqa(kv_heads=1)",
    "sigmoid": "sigmoid",
}
PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"

Build = Callable[[str | None], nn.Module]
Door = Callable[[Path, str | None], nn.Module]


def outcome(door: Door, path: Path, attention: str | None) -> str:
    """Load the checkpoint at `path` by `door` into a model with `attention`; returns a key of matrix.OUTCOMES.

    "refused" and "unexpected" are RuntimeErrors if PyTorch raises them. Any other outcome fails: the host reports the
    key in a warning of its own, an error does not name the key, or the model does not have the checkpoint's weights.
    """
    message = kind = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = door(path, attention)
        except CheckpointError as error:
            message, kind = str(error), "refused"
        except RuntimeError as error:
            message, kind = str(error), "unexpected" if "Unexpected key" in str(error) else "refused"
            assert ENTRY in message
        if message:
            assert "attention_from" in message
            return kind
    ours = [w for w in caught if issubclass(w.category, AttentionMismatchWarning)]
    assert len(ours) <= 1
    assert not [w for w in caught if ENTRY in str(w.message)], "the host reports the key"
    weights = torch.load(path, weights_only=True)["state_dict"]
    loaded = model.state_dict()
    assert weights.keys() <= loaded.keys()
    for name, given in weights.items():
        if loaded[name].shape == given.shape:  # key heads of a stock checkpoint may have been pooled
            torch.testing.assert_close(loaded[name], given)
    return "warns" if ours else "loads"


def found(build: Build, doors: dict[str, Door], folder: Path) -> dict[tuple[str, str, str], str]:
    """Return what every door makes of every pair: (door, checkpoint, model) -> outcome."""
    for name, attention in ATTENTION.items():
        torch.manual_seed(0)
        torch.save({"epoch": 1, "state_dict": dict(build(attention).state_dict())}, folder / f"{name}.pth")
    return {
        (door, checkpoint, model): outcome(doors[door], folder / f"{checkpoint}.pth", ATTENTION[model])
        for door in doors
        for checkpoint in ATTENTION
        for model in ATTENTION
    }


def compare_with_page(outcomes: dict[tuple[str, str, str], str], name: str) -> None:
    """Fail if the section `name` of docs/checkpoints.md is not what was found; the new table is in the message."""
    made = table(outcomes)
    assert made == committed(PAGE, name), f"the section {name} of {PAGE.name} should read\n\n{made}\n"
