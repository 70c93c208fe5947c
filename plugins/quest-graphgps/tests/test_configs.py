"""The shipped configs build the paper's models, also with their commented start, and suites have their defaults."""

from importlib.resources import files
from pathlib import Path

import pytest
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model

from devtools.configs import with_start
from quest_suites.graphgps import gps  # noqa: F401  # registers GPSModel
from quest_suites.graphgps.suites import SUITES

OFFERED = sorted((Path(str(files("quest_graphgps"))) / "configs").glob("*.yaml"))
SIZES = {"pattern": (3, 2, 337_201), "cluster": (7, 6, 502_054), "zinc": (1, 1, 423_717), "cifar10": (5, 10, 112_726)}
"""Config -> features, outputs, and parameters as the paper counts them (tables A10 and A11)."""


def build(path):
    set_cfg(cfg)
    cfg.merge_from_file(str(path))
    cfg.accelerator = "cpu"
    cfg.share.dim_in, cfg.share.dim_out, parameters = SIZES[path.stem]
    model = create_model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    return model.model.attention_report


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_shipped_configs_build_the_papers_models(path):
    assert build(path).attention == "quest"


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path):
    (tmp_path / path.name).write_text(with_start(path))
    report = build(tmp_path / path.name)
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
