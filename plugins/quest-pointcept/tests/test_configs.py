"""The start that the shipped configs offer in a comment is one that Point Transformer V3 takes."""

from __future__ import annotations

import pytest
from test_surfaces import SEGMENTATION
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Segmentation

import quest_core
import quest_pointcept  # noqa: F401  # torch-pointcloud's models accept attention= from here on
from devtools.configs import with_start
from quest_pointcept.configs import HERE as CONFIGS

OFFERED = sorted(path for path in CONFIGS.glob("*/*quest*.py"))


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_commented_start_builds(path):
    scope: dict = {}
    exec(with_start(path), scope)
    attention = scope["model"]["backbone"]["attention"]
    model = PointTransformerV3Segmentation(**SEGMENTATION, attention=attention)
    report = model.attention_report
    assert report.attention == str(quest_core.AttentionConfig.parse(attention))
    for replacement in report.replacements:
        assert replacement.query_norms == pytest.approx([12] * len(replacement.query_norms), rel=1e-4)
