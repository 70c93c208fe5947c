"""Pointcept's own trainer and launcher on GPUs: tools/train.py, one process for each GPU, NCCL between them.

It needs a checkout of Pointcept in QUEST_POINTCEPT_ROOT and what that requires, flash-attn and pointops excepted.
Without a GPU the same runs by gloo, in plugins/quest-pointcept/tests/test_pointcept.py.
"""

import os
from pathlib import Path

import pytest
import torch

environment = "quest-pointcept"

ROOT = os.environ.get("QUEST_POINTCEPT_ROOT")
BENCHMARKS = Path(__file__).parents[2] / "plugins/quest-pointcept/tests"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(ROOT is None, reason="QUEST_POINTCEPT_ROOT names no checkout of Pointcept"),
]
HEADS = ("model.backbone.enc_num_head=[3,6,12]", "model.backbone.dec_num_head=[3,6]")
"""Heads of 8 features, as the flash kernels want them."""


@pytest.fixture
def real_pointcept(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(ROOT)
    import real_pointcept

    return real_pointcept


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_trainer_on_gpus(gpus, real_pointcept, tmp_path):
    """Standard is Pointcept's own attention; quest trains in every process, where Pointcept would call flash-attn."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed, and {torch.cuda.device_count()} are there")
    root, data = Path(ROOT or ""), tmp_path / "data"
    real_pointcept.write_nuscenes(data, **real_pointcept.SCENES)

    def run(attention, *options):
        folder = tmp_path / f"{attention}{len(options)}"
        path = real_pointcept.config(root, "PT-v3m1", attention, data, folder)
        (made,) = real_pointcept.train(root, path, gpus=gpus, options=(f"num_worker={gpus}", *HEADS, *options))
        return made

    stock, standard, quest = run(None), run("standard"), run("quest", "model.backbone.enable_flash=True")
    assert len(stock.losses) == 16
    # Kernels that add in any order, on both sides: equal at the first step, and near each other after.
    assert standard.losses[0] == pytest.approx(stock.losses[0], rel=1e-3)
    assert standard.losses == pytest.approx(stock.losses, rel=0.05)
    noted = [line for line in quest.lines if "] attention=quest in 8 modules" in line]
    assert len(noted) == gpus
    assert sum(quest.losses[8:]) < sum(quest.losses[:8])
