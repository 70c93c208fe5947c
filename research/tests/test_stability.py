"""stability/rates: a rate that diverges stays in the result, and the range of good rates is counted right."""

import math

import pytest
import torch
from cells import cell, run
from torch import nn

import quest_core
from quest_research.suites.language import LanguageModel
from quest_suites.contract import observe

SMALL = {"train": 96, "validation": 32, "test": 64, "epochs": 2, "layers": 1, "width": 16, "rates": 2}


@pytest.mark.parametrize("broken", [0, 1])
def test_a_layer_of_nan_is_seen_wherever_it_stands(broken):
    layers = nn.ModuleList(quest_core.Attention(8, 2, "quest") for _ in range(2))
    nn.init.constant_(next(layers[broken].parameters()), math.nan)
    model = Each(layers)
    assert math.isnan(observe(model, torch.randn(2, 5, 8))["max_logit"])
    with pytest.raises(RuntimeError):
        observe(model, torch.randn(2, 5, 7))
    observe(model, torch.randn(2, 5, 8))  # the failed call left no Monitor behind


class Each(nn.Module):
    """Calls every layer with the input."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            layer(x)


def test_a_rate_that_diverges_counts_as_guessing(data):
    result = run(cell("stability/rates", "vit", data=data, smoke=False, **SMALL, lowest=1e30))
    assert result.metrics["diverged"] == 2
    assert result.metrics["accuracy"] == 10
    assert math.isnan(result.metrics["best accuracy"])
    assert result.details["diverged"] == ["lr=1e+30", "lr=3.2e+30"]


@pytest.mark.parametrize("task", ["vit", "pydocs"])
def test_a_cell_measures_every_rate(data, task):
    result = run(cell("stability/rates", task, data=data, smoke=False, **SMALL))
    scores = [result.metrics["accuracy/lr=0.001"], result.metrics["accuracy/lr=0.0032"]]
    assert result.metrics["accuracy"] == sum(scores) / 2
    assert result.metrics["best accuracy"] in scores
    for name in ("max_logit", "entropy", "query_norm", "key_norm", "validation", "train_loss"):
        assert len(result.series[f"{name}/lr=0.0032"]) == 2
        assert all(map(math.isfinite, result.series[f"{name}/lr=0.0032"]))


def test_clipping_bounds_the_logits_of_training(data):
    tops = {}
    for threshold in (0, 0.01):
        more = {**SMALL, "epochs": 5, "qk_clip": threshold}  # 10 steps
        series = run(cell("stability/rates", "vit", data=data, smoke=False, **more)).series
        _, tops[threshold] = series["training_logit/lr=0.0032"]
    assert tops[0.01] < tops[0] / 2


def test_the_language_model_sees_no_later_character():
    model = LanguageModel("quest", 11, cell("stability/rates", "vit", **SMALL).options).eval()
    tokens = torch.randint(11, (1, 20))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 11
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
