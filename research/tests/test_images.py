"""images/*: the measurements of a cell, and its errors for missing or broken data."""

import math

import numpy as np
import pytest
import torch
from cells import cell, run

from quest_core.errors import ConfigError
from quest_research.suites import images

SUITE = "images/fashion-mnist"


@pytest.mark.parametrize("attention", ["standard", "quest", "quest(init=6)", "qknorm-hs", "elliptical-quest"])
def test_a_cell_measures(data, attention):
    result = run(cell(SUITE, "lr=0.003", attention, data))
    assert 0 <= result.metrics["accuracy"] <= 100
    assert result.metrics["diverged"] == 0
    assert len(result.series["accuracy"]) == 1
    assert math.isfinite(result.metrics["max_logit"])
    if attention.startswith("quest"):  # `init` survives the initialization of the model
        norm = result.metrics["first_query_norm"]
        assert norm == pytest.approx(6, rel=0.1) if "init" in attention else norm < 1


def test_digits_come_with_scikit_learn_and_show_the_largest_logit():
    result = run(cell("images/digits", "lr=0.03"))
    assert result.series["max_logit"][-1] == pytest.approx(result.metrics["max_logit"])
    from sklearn.datasets import load_digits

    found, splits = load_digits(), images.digits()
    theirs = torch.from_numpy(found.images).float()[:, None] / 16
    assert torch.equal(torch.cat([own for own, _ in splits]), theirs)
    assert torch.cat([labels for _, labels in splits]).tolist() == found.target.tolist()
    assert len(splits[1][1]) == 597


def test_missing_and_broken_data_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no train-images-idx3-ubyte\.gz in .*dataset-fashion-mnist"):
        run(cell(SUITE, "lr=0.003", data=tmp_path))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + bytes(20))
    with pytest.raises(ConfigError, match="is not a complete IDX file"):
        run(cell(SUITE, "lr=0.003", data=tmp_path))


ATTENTIONS = (
    "standard", "quest(init=12)", "qnorm", "qknorm-ds", "elliptical-quest", "linear", "sigmoid", "cosine", "sinkhorn",
    "aft-conv",
)  # fmt: skip
"""Those that the suite compares, among them the five attentions of Your Attention Matters."""


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_trains_with_the_recipe_of_deit(data, attention):
    result = run(cell("images/recipes", "deit", attention, data, warmup=0))
    assert result.metrics["diverged"] == 0
    assert math.isfinite(result.series["train_loss"][0])


@pytest.mark.parametrize("precision", images.PRECISIONS)
def test_a_recipe_trains_in_each_precision(data, precision):
    assert math.isfinite(
        run(cell("images/recipes", "vit", "quest", data, warmup=0, precision=precision)).series["train_loss"][0]
    )


def test_a_recipe_reports_the_rate_that_validation_chooses(data):
    result = run(cell("images/recipes", "vit", "quest", data, warmup=0, rate=1e-6, rates=6, validation=60))
    rates = [name.removeprefix("accuracy/") for name in result.metrics if name.startswith("accuracy/")]
    assert rates == ["lr=1e-06", "lr=3.2e-06", "lr=1e-05", "lr=3.2e-05", "lr=0.0001", "lr=0.00032"]
    best = max(rates, key=lambda rate: max(result.series[f"validation/{rate}"]))
    assert result.details["chosen"] == best
    assert result.metrics["accuracy"] == result.metrics[f"accuracy/{best}"]


def test_augmentation_keeps_probabilities_and_mixes_in_proportion():
    x, y = torch.zeros(8, 1, 16, 16), torch.arange(8) % 4
    x[4:] = 1  # the batch is mixed with its reverse, so each image is mixed with one of the other value
    for seed in range(20):
        mixed, target = images.augment(x.clone(), y, 4, torch.Generator().manual_seed(seed))
        assert mixed.shape == x.shape
        torch.testing.assert_close(target.sum(1), torch.ones(8))
        assert (target >= 0.1 / 4 - 1e-6).all()


def test_images_of_cifar_are_read(tmp_path):
    draw = torch.Generator().manual_seed(0)
    options = {"train": 6, "validation": 2, "test": 3}
    labels = torch.arange(10, dtype=torch.uint8)[:, None]
    table = torch.cat([labels, (labels + 100).expand(-1, 3072)], 1)
    for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (tmp_path / f"{name}.bin").write_bytes(table.numpy().tobytes())
    cifar = images.load(tmp_path, options, draw)
    assert cifar.train[0].shape == (6, 3, 32, 32)
    assert cifar.classes == 10
    torch.testing.assert_close(cifar.train[0][:, 0, 0, 0] * 255, 100 + cifar.train[1].float())
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ConfigError, match="binary version"):
        images.load(tmp_path, options, draw)


def test_signals_are_images_of_one_row(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 40)), np.arange(20) % 10
    np.savez(tmp_path / "mnist1d.npz", x=x, y=y, x_test=x[:5], y_test=y[:5])
    signals = images.load(tmp_path, {"train": 4, "validation": 2}, torch.Generator().manual_seed(0))
    shape = {"patch": 1, "width": 8, "layers": 1, "heads": 2}
    assert images.build("quest", signals, shape)(signals.test[0]).shape == (5, 10)
    with pytest.raises(ConfigError, match="patch is 4, which does not divide the sides of 1 × 40 pixels"):
        images.build("quest", signals, shape | {"patch": 4})
