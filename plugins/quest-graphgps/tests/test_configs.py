"""The start that the shipped configs offer in a comment is one that the GPS model takes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model

from quest_core.testing.configs import with_start
from quest_graphgps.bench import gps  # noqa: F401  # registers GPSModel

EXAMPLE = Path(__file__).parents[3] / "examples" / "graphgps" / "pattern.yaml"
OFFERED = [*sorted((Path(str(files("quest_graphgps"))) / "configs").glob("*.yaml")), EXAMPLE]


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_commented_start_builds(path, tmp_path) -> None:
    set_cfg(cfg)
    (tmp_path / path.name).write_text(with_start(path))
    cfg.merge_from_file(str(tmp_path / path.name))
    cfg.accelerator = "cpu"
    cfg.share.dim_in, cfg.share.dim_out = 14, 1
    report = create_model().model.attention_report
    assert report.attention == "quest(init=12.0)"
    for replacement in report.replacements:
        assert replacement.query_norms == pytest.approx([12] * len(replacement.query_norms), rel=1e-4)
