"""The phases that suites train in: what is selected, and a loss that is not finite."""

from typing import Any

import pytest
import torch
from torch import nn

from quest_research.suites.training import Float16Products, fit
from quest_suites.contract import Cell

PHASE: dict[str, Any] = {"rate": 0.1, "weight_decay": 0.0}


def train(folder, scores, **options):
    """Train a model whose validation is given; returns the phase and the weights after each epoch."""
    cell = Cell("s", "t", "quest", 0, False, None, {}, folder)
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 1), []
    data = torch.randn(8, 3)

    def measure():
        seen.append(model.weight.detach().clone())
        return {"score": scores[len(seen) - 1]}

    def loss(picked):
        return (model(data[picked]) - 1).square().mean()

    phase = PHASE | {"epochs": len(scores), "batch": 4}
    found = fit(cell, "p", model, loss, len(data), phase, measure=measure, progress=lambda share, text: None, **options)
    return found, seen


def test_the_weights_of_the_selected_epoch_are_kept(tmp_path):
    for name, options, epoch in (("last", {}, 2), ("max", {"select": "score"}, 1), ("min", {"best": min}, 0)):
        folder = tmp_path / name
        folder.mkdir()
        found, seen = train(folder, [1.0, 3.0, 2.0], **({"select": "score"} if name == "min" else {}), **options)
        assert found.selected == epoch
        assert torch.equal(found.weights["weight"], seen[epoch])
        assert not torch.equal(seen[0], seen[2])


def test_a_loss_that_is_not_finite_ends_the_phase(tmp_path):
    """A second start does not train again."""
    cell = Cell("s", "t", "quest", 0, False, None, {}, tmp_path)
    model = nn.Linear(2, 1)
    asked = []

    def loss(picked):
        asked.append(len(picked))
        return model(torch.full((len(picked), 2), torch.nan if len(asked) > 2 else 1.0)).mean()

    phase = PHASE | {"epochs": 3, "batch": 2}
    for _ in range(2):
        found = fit(cell, "warm", model, loss, 4, phase, measure=dict, progress=lambda share, text: None)
        assert found.diverged == "warm: the loss of epoch 2 is nan"
        assert len(found.series["train_loss"]) == 1
        assert asked == [2, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_of_float16_are_those_of_pytorch(dtype):
    """Forward and backward, beyond the largest number too; other types are not changed."""

    def products():
        torch.manual_seed(0)
        x, w = torch.randn(2, 5, 40, dtype=dtype).requires_grad_(), torch.randn(7, 40, dtype=dtype).requires_grad_()
        out = torch.nn.functional.linear(x, w, torch.ones(7, dtype=dtype)) @ torch.ones(2, 7, 3, dtype=dtype)
        out.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        huge = torch.full((1, 9), 300.0, dtype=dtype)
        return [out.detach(), x.grad, w.grad, huge @ huge.T]

    expected = products()
    with Float16Products():
        found = products()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, **({} if dtype == torch.float16 else {"rtol": 0, "atol": 0}))
    assert found[-1].isinf().item() == (dtype == torch.float16)
