"""images/*: the measurements of a cell, and its errors for missing or broken data."""

from __future__ import annotations

import gzip
import math
import tempfile
from pathlib import Path

import pytest
import torch

from quest_bench import images
from quest_bench.suites import IMAGE_OPTIONS
from quest_core.benchmarks import Cell, Result
from quest_core.errors import ConfigError
from quest_core.testing.cells import check_resume

DEFAULTS = {option["name"]: option["default"] for option in IMAGE_OPTIONS}


def write(folder: Path, split: str, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(10, (count,), generator=draw, dtype=torch.uint8)
    pixels = torch.randint(60, (count, 28, 28), generator=draw, dtype=torch.uint8)
    pixels += (labels * 19)[:, None, None]  # brighter for each class, so that there is something to learn
    for name, raw, axes in ((f"{split}-images-idx3-ubyte", pixels, 3), (f"{split}-labels-idx1-ubyte", labels, 1)):
        head = bytes([0, 0, 8, axes]) + b"".join(size.to_bytes(4, "big") for size in raw.shape)
        (folder / f"{name}.gz").write_bytes(gzip.compress(head + raw.numpy().tobytes()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fashion")
    write(folder, "train", 600)
    write(folder, "t10k", 200)
    return folder


def run(data: Path | None, attention: str = "quest", task: str = "lr=0.003", **options: object) -> Result:
    cell = Cell("images/fashion-mnist", task, attention, 0, True, data, DEFAULTS | options, Path(tempfile.mkdtemp()))
    return images.run(cell, lambda fraction, text: None)


@pytest.mark.parametrize("attention", ["standard", "quest", "quest(init=6)", "qknorm-hs", "elliptical-quest"])
def test_a_cell_measures(data: Path, attention: str) -> None:
    result = run(data, attention)
    assert 0 <= result.metrics["accuracy"] <= 100
    assert result.metrics["diverged"] == 0
    assert len(result.series["accuracy"]) == 1
    assert math.isfinite(result.metrics["max_logit"])


def test_the_start_survives_the_initialisation_of_the_model(data: Path) -> None:
    assert run(data, "quest(init=6)").metrics["first_query_norm"] == pytest.approx(6, rel=0.1)
    assert run(data, "quest").metrics["first_query_norm"] < 1


def test_a_cell_is_repeatable(data: Path) -> None:
    assert run(data).metrics == run(data).metrics


def test_a_run_without_a_finite_loss_is_diverged_not_scored(data: Path) -> None:
    result = run(data, "standard", task="lr=1e30")
    assert result.metrics["diverged"] == 1
    assert math.isnan(result.metrics["accuracy"])


def test_missing_and_broken_data_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no train-images-idx3-ubyte\.gz in .*dataset-fashion-mnist"):
        run(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + bytes(20))
    with pytest.raises(ConfigError, match="is not a complete IDX file"):
        run(tmp_path)
    with pytest.raises(ConfigError, match="patch is 5"):
        run(data, patch=5)


def test_a_stopped_cell_continues_at_its_last_epoch(data: Path, tmp_path: Path) -> None:
    options = DEFAULTS | {"train": 200, "validation": 100, "epochs": 2, "layers": 1}
    cell = Cell("images/fashion-mnist", "lr=0.003", "quest", 0, False, data, options, tmp_path)
    check_resume(images.run, cell, tmp_path, share=0.5)
