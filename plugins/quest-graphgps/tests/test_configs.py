"""The shipped configs: their commented start is one that GPS takes, and the suites' defaults are theirs."""

from importlib.resources import files
from pathlib import Path

import pytest
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model

from devtools.configs import with_start
from quest_suites.graphgps import gps  # noqa: F401  # registers GPSModel
from quest_suites.graphgps.suites import SUITES

OFFERED = sorted((Path(str(files("quest_graphgps"))) / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path):
    set_cfg(cfg)
    (tmp_path / path.name).write_text(with_start(path))
    cfg.merge_from_file(str(tmp_path / path.name))
    cfg.accelerator = "cpu"
    cfg.share.dim_in, cfg.share.dim_out = 14, 1
    report = create_model().model.attention_report
    assert report.attention == "quest(init=12.0)"
    for replacement in report.replacements:
        assert replacement.query_norms == pytest.approx([12] * len(replacement.query_norms), rel=1e-4)


@pytest.mark.parametrize("suite", [name for name in SUITES if "paper" in SUITES[name]])
def test_the_defaults_of_a_suite_are_those_of_its_config(suite):
    set_cfg(cfg)
    cfg.merge_from_file(str(OFFERED[0].with_name(f"{SUITES[suite]['tasks'][0].lower()}.yaml")))
    default = {option["name"]: option["default"] for option in SUITES[suite]["options"]}
    keys = {"layers": cfg.gt.layers, "attn_dropout": cfg.gt.attn_dropout, "batch_size": cfg.train.batch_size}
    keys |= {"lr": cfg.optim.base_lr, "warmup_epochs": cfg.optim.num_warmup_epochs, "epochs": cfg.optim.max_epoch}
    assert {key: default[key] for key in keys} == keys
