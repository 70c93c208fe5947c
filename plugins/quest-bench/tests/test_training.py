"""The phases that gqa, explain and aft train in: what is selected, and a loss that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quest_bench.training import DivergedError, fit
from quest_core.benchmarks import Cell


def train(folder: Path, scores: list[float], **options: Any) -> tuple[nn.Linear, list[torch.Tensor]]:
    """Train a model whose validation is given; returns it and its weights after each epoch."""
    cell = Cell("s", "t", "quest", 0, False, None, {}, folder)
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 1), []
    data = torch.randn(8, 3)

    def measure() -> dict[str, float]:
        seen.append(model.weight.detach().clone())
        return {"score": scores[len(seen) - 1]}

    fit(
        cell,
        "p",
        model,
        lambda picked: (model(data[picked]) - 1).square().mean(),
        len(data),
        epochs=len(scores),
        batch=4,
        rate=0.1,
        weight_decay=0.0,
        measure=measure,
        progress=lambda share, text: None,
        **options,
    )
    return model, seen


def test_the_weights_of_the_selected_epoch_are_kept(tmp_path: Path) -> None:
    for name, options, epoch in (("last", {}, 2), ("max", {"select": "score"}, 1), ("min", {"best": min}, 0)):
        folder = tmp_path / name
        folder.mkdir()
        model, seen = train(folder, [1.0, 3.0, 2.0], **({"select": "score"} if name == "min" else {}), **options)
        assert torch.equal(model.weight, seen[epoch])
        assert not torch.equal(seen[0], seen[2])


def test_a_loss_that_is_not_finite_ends_the_phase(tmp_path: Path) -> None:
    cell = Cell("s", "t", "quest", 0, False, None, {}, tmp_path)
    model = nn.Linear(2, 1)
    with pytest.raises(DivergedError, match="warm: the loss of epoch 1 is nan"):
        fit(
            cell,
            "warm",
            model,
            lambda picked: model(torch.full((len(picked), 2), torch.nan)).mean(),
            4,
            epochs=1,
            batch=2,
            rate=0.1,
            weight_decay=0.0,
            measure=dict,
            progress=lambda share, text: None,
        )
