"""The shipped configs: variants in half precision train, and mmseg takes the start that a comment offers."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import mmseg
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.runner import amp
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from mmseg.utils import register_all_modules

import quest_mmseg
from devtools.configs import with_start
from quest_core.projections import Projected

CONFIGS = Path(quest_mmseg.__file__).parent / "configs"
EXAMPLE = Path(__file__).parents[3] / "examples" / "mmseg" / "segmenter_quest.py"
OFFERED = [path for path in (*sorted(CONFIGS.glob("*.py")), EXAMPLE) if "init=" in path.read_text()]


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path) -> None:
    register_all_modules()
    for base in CONFIGS.glob("*.py"):  # a config's _base_ is its neighbour
        shutil.copy(base, tmp_path)
    text = with_start(path).replace("mmseg::", f"{mmseg.__path__[0]}/.mim/configs/")  # the fork does not read mmseg::
    (tmp_path / path.name).write_text(text)
    model = MODELS.build(Config.fromfile(tmp_path / path.name).model)
    model.init_weights()
    parts = [module for module in model.modules() if isinstance(module, Projected)]
    assert len(parts) in (6, 14)
    norms = torch.cat([part.projections.norms(part, part.head_sizes, "q") for part in parts])
    torch.testing.assert_close(norms, torch.full_like(norms, 12), rtol=1e-4, atol=0)


def test_the_configs_of_quest_offer_a_start() -> None:
    assert len(OFFERED) == 7


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*-amp-*.py")), ids=lambda path: path.stem)
def test_the_variants_in_half_precision_train(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own model and optim_wrapper, on images of 64x64.

    mmengine's AmpOptimWrapper wants an accelerator, and its autocast on a CPU bfloat16. PyTorch's own autocast and
    GradScaler for the CPU, which know both types, stand in for those of CUDA.
    """
    register_all_modules()
    monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu"))
    monkeypatch.setattr(amp, "autocast", functools.partial(torch.autocast, "cpu"))
    given, dtypes = torch.nn.functional.scaled_dot_product_attention, set()

    def watched(q, *arguments, **named):
        dtypes.add(q.dtype)
        return given(q, *arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    config = Config.fromfile(path)
    config.model.data_preprocessor.size = config.model.backbone.img_size = (64, 64)
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    truth = PixelData(data=torch.randint(150, (1, 64, 64)))
    data = {"inputs": [torch.randint(255, (3, 64, 64))] * 2, "data_samples": [SegDataSample(gt_sem_seg=truth)] * 2}
    losses = [model.train_step(data, wrapper)["decode.loss_ce"].item() for _ in range(4)]
    assert dtypes == {getattr(torch, config.optim_wrapper.dtype)}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert losses[-1] < losses[0]
