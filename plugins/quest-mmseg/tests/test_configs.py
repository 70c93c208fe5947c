"""The start that the shipped configs offer in a comment is one that mmsegmentation takes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmseg.registry import MODELS
from mmseg.utils import register_all_modules

import quest_mmseg
from quest_core.projections import Projected
from quest_core.testing.configs import with_start

CONFIGS = Path(quest_mmseg.__file__).parent / "configs"
EXAMPLE = Path(__file__).parents[3] / "examples" / "mmseg" / "segmenter_quest.py"
OFFERED = [path for path in (*sorted(CONFIGS.glob("*.py")), EXAMPLE) if "init=" in path.read_text()]


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path) -> None:
    register_all_modules()
    for base in CONFIGS.glob("*.py"):  # a config's _base_ is its neighbour
        shutil.copy(base, tmp_path)
    (tmp_path / path.name).write_text(with_start(path))
    model = MODELS.build(Config.fromfile(tmp_path / path.name).model)
    model.init_weights()
    parts = [module for module in model.modules() if isinstance(module, Projected)]
    assert len(parts) in (6, 14)
    norms = torch.cat([part.projections.norms(part, part.head_sizes, "q") for part in parts])
    torch.testing.assert_close(norms, torch.full_like(norms, 12), rtol=1e-4, atol=0)


def test_the_configs_of_quest_offer_a_start() -> None:
    assert len(OFFERED) == 7
