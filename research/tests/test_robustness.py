"""robustness/images: each task measures its shift, and the shifts are the same for every attention."""

import sys

import numpy as np
import pytest
import torch
from cells import cell, run

from quest_core.errors import ConfigError, PluginError
from quest_research.suites import robustness
from quest_research.suites.suites import SUITES

SUITE = "robustness/images"


ITEMS = {"fog": 3, "corruptions": 15, "attacks": 3, "autoattack": 1, "patch": 1}


@pytest.mark.parametrize("task", SUITES[SUITE]["tasks"])
def test_every_task_reports_the_mean_of_its_shifts(data, task):
    pytest.importorskip("torchattacks" if "attack" in task else "imagecorruptions")
    result = run(cell(SUITE, task, data=data))
    scores = [value for name, value in result.metrics.items() if name.startswith("accuracy/")]
    assert len(scores) == ITEMS[task]
    assert result.metrics["accuracy"] == pytest.approx(sum(scores) / len(scores))
    assert result.metrics["relative accuracy"] == pytest.approx(
        100 * result.metrics["accuracy"] / result.metrics["clean"]
    )
    assert len(result.details["best_epochs"]) == (2 if task == "fog" else 1)


def test_corruptions_are_repeatable_and_leave_the_generators_alone():
    pytest.importorskip("imagecorruptions")
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for name in robustness.CORRUPTIONS:
        before = np.random.get_state()[1]
        once = robustness.corrupt(images, name, 3)
        assert (np.random.get_state()[1] == before).all()
        assert once.shape == images.shape
        assert once.min() >= 0
        assert once.max() <= 1
        np.random.random()
        assert torch.equal(once, robustness.corrupt(images, name, 3)), name
        assert not torch.allclose(once, images, atol=0.02), name


def test_attacks_stay_within_their_budget(data):
    pytest.importorskip("torchattacks")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    split = (images, labels)
    given = robustness.Images(split, split, split, 3)
    for name, attack in robustness.attacks("attacks", model, given, 1 / 255, True).items():
        change = (attack(images, labels) - images).abs().max()
        assert 0 < change <= (robustness.SPSA_EPSILON if name == "SPSA" else 1 / 255) + 1e-6


def test_the_square_is_at_the_place_of_the_class_or_of_another():
    labels = torch.arange(10).repeat(30)
    images = torch.zeros(300, 1, 28, 28)
    own, _ = robustness.patch((images, labels), 10, 1.0)
    other, _ = robustness.patch((images, labels), 10, 0.0)
    mixed, _ = robustness.patch((images, labels), 10, 0.9)
    places = own[:10]  # one of each class
    assert own.sum((1, 2, 3)).eq(robustness.PATCH**2).all()
    assert len(places.flatten(1).unique(dim=0)) == 10
    assert torch.equal(own, places.repeat(30, 1, 1, 1))
    assert (other != own).flatten(1).any(1).all()
    assert {tuple(x.tolist()) for x in other.flatten(1)} == {tuple(x.tolist()) for x in places.flatten(1)}
    assert 0.8 < (mixed == own).flatten(1).all(1).float().mean() < 0.97
    with pytest.raises(ConfigError, match="49 places"):
        robustness.patch((images, labels), 100, 1.0)


def test_a_missing_package_is_named_with_its_command(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    monkeypatch.setattr(robustness, "classify", _no_training)
    with pytest.raises(PluginError, match="pip install --no-deps torchattacks"):
        run(cell(SUITE, "attacks", data=data))


def _no_training(*_, **__):
    raise AssertionError("a missing package is found before training")
