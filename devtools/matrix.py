"""The outcome of the loaders of a host with a checkpoint of another attention; the table is in docs/checkpoints.md."""

import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from quest_core.checkpoints import ENTRY, AttentionMismatchWarning
from quest_core.errors import QuestError

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
Load = Callable[..., Any]
"""load(checkpoint, model) or load(checkpoint, model, attention_from), with "stock" or the text of an attention. It may
return two tensors: a loaded weight, and the same weight in the checkpoint."""


def outcome(load: Load, *cell: str) -> str:
    """Return "loads", "warns" (once), "error" (one of quest_core's), or "unexpected key" (an error of the host)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            weights = load(*cell)
        except Exception as error:  # a host may wrap ours
            causes = list(_causes(error))
            if any(isinstance(cause, QuestError | AttentionMismatchWarning) for cause in causes):
                return "error"
            if any(ENTRY in str(cause) for cause in causes):
                return "unexpected key"
            raise
    if weights is not None:
        torch.testing.assert_close(*weights)
    warned = [w for w in caught if issubclass(w.category, AttentionMismatchWarning)]
    assert len(warned) <= 3, f"{len(warned)} warnings"  # some loaders load the weights and their average
    return "warns" if warned else "loads"


def check_loader(
    load: Load, host: str, loader: str, *, among: Collection[str] | None = None, named: bool = True
) -> None:
    """Load five pairs of a checkpoint and a model, and compare the outcomes with the page.

    Args:
        host, loader: as the table names them.
        among: all loaders of the host that are tested; the table must have these.
        named: whether `load` takes `attention_from`.
    """
    assert among is None or committed(host).keys() == set(among)
    assert outcome(load, "quest", "quest") == "loads"
    assert outcome(load, "quest", "sigmoid") == "error"
    if named:
        assert outcome(load, "quest", "sigmoid", "quest") == "loads"
    found = outcome(load, "stock", "quest"), outcome(load, "quest", "stock")
    assert committed(host).get(loader) == found, f"{PAGE.name}: | {host} | {loader} | {' | '.join(found)} |"


def committed(host: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of a host: loader -> (stock checkpoint into quest, quest checkpoint into a stock model)."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(f"| {host} |")]
    return {loader: tuple(outcomes) for _, loaders, *outcomes in rows for loader in loaders.split("; ")}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__
