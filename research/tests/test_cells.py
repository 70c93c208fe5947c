"""What every suite is held to: a stopped cell continues, one that diverges is not scored, errors name the cause."""

import math
from typing import Any

import pytest
from cells import cell, run

from devtools.cells import check_resume
from quest_core.errors import ConfigError, InputError

SMALL: dict[str, dict[str, Any]] = {
    "toy/spurious": {"samples": 64, "test_samples": 64, "epochs": 2, "weight_seeds": 1},
    "images/fashion-mnist": {"train": 200, "validation": 100, "epochs": 2, "layers": 1},
    "stability/rates": {
        "train": 96, "validation": 32, "test": 64, "epochs": 2, "layers": 1, "width": 16, "rates": 2,
    },
    "robustness/images": {"train": 64, "validation": 32, "test": 32, "shifted": 4, "epochs": 1, "layers": 1},
    "gqa/fashion-mnist": {
        "train": 96, "uptrain_images": 96, "downstream": 96, "validation": 40, "rounds": 2, "layers": 2, "width": 32,
        "heads": 4, "pretrain": 1, "uptrain": 2, "finetune": 1,
    },
    "explain/fashion-mnist": {"train": 100, "validation": 50, "test": 50, "epochs": 2, "layers": 1},
    "aft/causal": {"images": 40, "epochs": 2, "layers": 1, "rounds": 1},
    "widths/text": {"steps": 6, "layers": 1, "width": 16, "rates": 2},
    "recall/mqar": {"train": 16, "batch": 4, "test": 8, "width": 16, "rates": 2},
    "recall/mad": {"train": 16, "batch": 4, "test": 8, "rates": 2},
    "calibration/pydocs": {"pretrain": 1, "finetune": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("suite", "task", "attention", "share"),
    [
        ("toy/spurious", "retrieval", "qknorm-hs", 0.5),
        ("images/fashion-mnist", "lr=0.003", "quest", 0.5),
        ("stability/rates", "vit", "quest", 0.7),  # the first epoch of the second of two rates
        ("robustness/images", "fog", "quest", 0.4),  # the second training
        ("gqa/fashion-mnist", "half", "pgqa", 0.2),
        ("gqa/fashion-mnist", "half", "pgqa", 0.5),
        ("explain/fashion-mnist", "canvas", "quest", 0.5),
        ("aft/causal", "image=7", "aft-simple", 0.5),
        ("widths/text", "D=4", "quest", 0.5),
        ("recall/mqar", "D=4", "quest", 0.5),
        ("recall/mad", "compression", "quest", 0.5),
        ("calibration/pydocs", "finetune", "quest", 0.7),  # the second of two fine-tunings
    ],
)
def test_a_stopped_cell_continues(suite, task, attention, share, data, tmp_path):
    if task == "fog":
        pytest.importorskip("imagecorruptions")
    given = cell(suite, task, attention, data, smoke=False, **SMALL[suite])
    check_resume(run, given, tmp_path, share=share)


@pytest.mark.parametrize(
    ("suite", "task", "attention", "options", "metric"),
    [
        ("images/fashion-mnist", "lr=1e30", "standard", {}, "accuracy"),
        ("gqa/fashion-mnist", "half", "gqa", {"pretrain_rate": 1e30}, "accuracy"),
        ("explain/fashion-mnist", "canvas", "standard", {"rate": 1e30}, "AG-CAM IoU"),
        ("aft/causal", "image=14", "standard", {"rate": 1e30}, "bits"),
        ("widths/text", "D=16", "standard", {"lowest": 1e30}, "bits"),
    ],
)
def test_a_run_without_a_finite_loss_is_not_scored(suite, task, attention, options, metric, data):
    assert math.isnan(run(cell(suite, task, attention, data, **options)).metrics[metric])


@pytest.mark.parametrize(
    ("suite", "task", "attention", "options", "words"),
    [
        ("images/fashion-mnist", "lr=0.003", "quest", {"patch": 5}, "patch is 5"),
        ("gqa/fashion-mnist", "half", "gqa(kv_heads=2)", {"heads": 4}, r"has kv_heads, which .* chooses: \[1, 2\]"),
        ("gqa/fashion-mnist", "half", "gqa", {"heads": 1}, "heads is 1"),
        ("explain/fashion-mnist", "canvas", "linear", {}, "'linear' has no weights to explain"),
        ("explain/fashion-mnist", "canvas", "quest", {"size": 40}, "size is 40; it is at least 28 and a multiple of"),
        ("aft/causal", "image=5", "quest", {}, "choose a divisor of 28"),
        ("widths/text", "D=8", "quest", {"width": 60}, "width is 60, which heads of 8 features do not divide"),
        ("recall/mqar", "D=4", "quest", {"pairs": 17}, "pairs is 17; a sequence of 64 tokens holds at most 16"),
        ("recall/mqar", "D=4", "quest", {"vocabulary": 33}, "vocabulary is 33; 16 pairs need 34 or more"),
        ("aft/causal", "text=64", "aft-local(max_length=32)", {}, "64 tokens are more than max_length=32"),
    ],
)
def test_what_does_not_fit_is_named(suite, task, attention, options, words, data):
    with pytest.raises((ConfigError, InputError), match=words):
        run(cell(suite, task, attention, data, **options))
