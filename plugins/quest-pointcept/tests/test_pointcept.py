"""Pointcept itself, from the checkout in QUEST_POINTCEPT_ROOT; without one this file is not collected (conftest.py)."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from clouds import clouds
from conftest import NOT_RUN, ROOT
from spawned import pointcept_model

if not ROOT:
    pytest.fail(f"QUEST_REQUIRE_POINTCEPT=1, and there is no checkout to run {NOT_RUN}", pytrace=False)

import real_pointcept
from pointcept.models.builder import MODELS
from pointcept.utils.config import Config

import quest_core
import quest_pointcept  # noqa: F401
from quest_core import Mechanism
from quest_core.benchmarks import Cell
from quest_core.testing import AdapterConformance
from quest_pointcept import PointceptAdapter
from quest_pointcept.configs import install_configs
from quest_pointcept.info import INFO
from quest_pointcept.scenes import write_nuscenes
from quest_pointcept.tasks import run_nuscenes

SMALL = {
    "in_channels": 4,
    "order": ("z", "z-trans"),
    "stride": (2,),
    "enc_depths": (2, 2),
    "enc_channels": (24, 48),
    "enc_num_head": (2, 4),
    "enc_patch_size": (16, 16),
    "dec_depths": (2,),
    "dec_channels": (24,),
    "dec_num_head": (2,),
    "dec_patch_size": (16,),
    "drop_path": 0.1,
    "proj_drop": 0.1,
    "shuffle_orders": False,  # they are drawn in evaluation, too; the trainer's tests shuffle them
    "enable_flash": False,
}


def build(name, **options):
    return MODELS.build({"type": name, **SMALL, **options})


def data(*counts):
    x, grid, batch = clouds(*counts)
    return {
        "feat": x,
        "coord": grid.float() / 10 + 0.05,
        "grid_coord": grid,
        "grid_size": 0.1,
        "offset": batch.bincount().cumsum(0),
    }


class Pointcept(AdapterConformance):
    adapter = PointceptAdapter()
    sites = 6
    autocasts = False  # spconv has no bfloat16 on a CPU
    compiles = False  # and cannot be traced
    refused = ("aft-conv",)
    name = "PT-v3m1"
    options: ClassVar[dict] = {}

    def make_model(self):
        return build(self.name, **self.options)

    def make_inputs(self):
        return (data(70, 45, 33),)

    def run(self, model, inputs):
        return model(copy.copy(inputs[0])).feat


class TestM1(Pointcept):
    pass


class TestM1SmallCloud(Pointcept):
    def make_inputs(self):
        return (data(70, 9, 33),)


class TestM1Relative(Pointcept):
    options: ClassVar[dict] = {"enable_rpe": True, "attn_drop": 0.1, "upcast_attention": True, "upcast_softmax": True}
    refused = ("linear", "aft-simple")


class TestM1Classification(Pointcept):
    sites = 4
    options: ClassVar[dict] = {"enc_mode": True}


class TestM2(Pointcept):
    name = "PT-v3m2"
    tolerance = 1e-4  # its gradients are sums of hundreds of rounded numbers
    options: ClassVar[dict] = {"layer_scale": 0.1, "mask_token": True, "traceable": True}

    def make_inputs(self):
        return ({**data(70, 45, 33), "mask": torch.arange(148) % 3 == 0},)


class TestM3(Pointcept):
    name = "PT-v3m3"
    options: ClassVar[dict] = {"shift_coords": 0.5, "jitter_coords": 1.2, "rescale_coords": 1.2}
    refused = ("aft-simple", "aft-full")


class TestM3HalfRotary(Pointcept):
    name = "PT-v3m3"
    options: ClassVar[dict] = {"dec_rope_enable": False}
    refused = ("aft-conv",)


# --- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PT-v3m1", "PT-v3m2", "PT-v3m3"])
def test_a_config_asks_for_attention(name, capsys):
    model = build(name, attention={"name": "quest", "kv_heads": 2})
    assert "attention=quest+gqa(kv_heads=2) in 6 modules" in capsys.readouterr().err
    assert {str(m.config) for m in model.modules() if isinstance(m, Mechanism)} == {"quest+gqa(kv_heads=2)"}


def test_flash_is_not_needed():
    """Pointcept's own default refuses to be built without flash-attn; with an attention it runs, patches as there."""
    with pytest.raises(AssertionError, match="flash_attn is installed"):
        build("PT-v3m1", enable_flash=True)
    model = build("PT-v3m1", enable_flash=True, attention="standard").eval()
    assert all(site.module.packed for site in PointceptAdapter().sites(model))
    assert model(data(70, 9, 33)).feat.isfinite().all()


def test_what_flash_excludes_is_told():
    with pytest.raises(quest_core.ConfigError, match="enable_rpe=True needs enable_flash=False"):
        build("PT-v3m1", enable_flash=True, enable_rpe=True, attention="quest")


def test_a_model_without_serialized_attention_refuses_the_key():
    with pytest.raises(TypeError, match="attention"):
        MODELS.build({"type": "SpUNet-v1m1", "in_channels": 4, "num_classes": 16, "attention": "quest"})


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
def test_a_frozen_encoder_stays_frozen(attention):
    model = build("PT-v3m2", freeze_encoder=True, attention=attention)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("embedding.", "enc."))}


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)"])
def test_initialisation_is_the_hosts(attention):
    """PT-v3m2 initialises every linear layer after building it; what replaces qkv has that spread, not PyTorch's."""
    torch.manual_seed(0)
    stock = build("PT-v3m2")
    torch.manual_seed(0)
    model = build("PT-v3m2", attention=attention)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if ours.shape == theirs.shape:
            torch.testing.assert_close(ours, theirs)
    weight = model.enc.enc1.block0.attn.qkv.weight
    assert 0.015 < weight.std().item() < 0.025
    model.apply(model._init_weights)  # and can be again
    assert 0.015 < weight.std().item() < 0.025


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)", "qknorm-hs"])
def test_lora_on_qkv(attention):
    from peft import LoraConfig, get_peft_model

    model = build("PT-v3m1", attention=attention)
    wrapped = get_peft_model(model.enc, LoraConfig(r=2, target_modules=["qkv"]))
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all(".qkv.lora_" in name for name in trained)
    model.enc = wrapped
    model(data(70, 45, 33)).feat.square().sum().backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.requires_grad)


def test_patches_of_two_sizes():
    """Pointcept lays a decoder out with its encoder's patches; here each has its own."""
    torch.manual_seed(0)
    model = build("PT-v3m1", dec_patch_size=(8,), attention="standard").eval()
    point = model(data(70, 45))
    assert {"quest_patches_16", "quest_patches_8"} <= set(point)


def test_what_is_kept_with_the_points_survives_a_copy():
    """A Point rebuilds the mappings and lists in it whenever it is copied through its constructor."""
    from pointcept.models.utils.structure import Point

    torch.manual_seed(0)
    point = build("PT-v3m1", enable_rpe=True, attention="quest").eval()(data(70, 45))
    kept = {key: value for key, value in point.items() if key.startswith("quest_")}
    assert {"quest_counts", "quest_patches_16", "quest_relative_16_0"} <= kept.keys()
    again = Point(point)
    assert all(again[key] is value for key, value in kept.items())


# --- child processes --------------------------------------------------------------------------------------------------


def test_a_spawned_child_knows_the_plugin():
    """As Pointcept's launcher does it: the Config is pickled, and the child never reads its file."""
    config = Config({"model": {"type": "PT-v3m1", **SMALL, "attention": "quest"}})
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=pointcept_model, args=(config, answers))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    assert answers.get()[1].startswith("attention=quest in 6 modules")


# --- tools/test.py ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["quest", "standard", None])
def test_a_checkpoint_is_tested_with_its_own_attention(attention, tmp_path):
    from pointcept.engines.test import SemSegTester

    def model(attention):
        return {"type": "PT-v3m1", **SMALL, **({} if attention is None else {"attention": attention})}

    path = tmp_path / "model_best.pth"
    torch.save({"epoch": 1, "state_dict": MODELS.build(model("quest")).state_dict()}, path)
    tester = object.__new__(SemSegTester)
    tester.logger = logging.getLogger("test")
    tester.cfg = SimpleNamespace(model=model(attention), weight=str(path), find_unused_parameters=False)
    if attention == "quest":
        tester.build_model()
        return
    with pytest.raises(quest_core.ConfigError, match="the model has 'standard'; test with model.backbone.attention='q"):
        tester.build_model()


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nuscenes")
    write_nuscenes(folder, **real_pointcept.SCENES)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model", real_pointcept.MODELS)
def test_the_trainer(model, dataset, tmp_path):
    """Two epochs: standard is Pointcept's own attention, step by step; quest trains. Then what a checkpoint says."""
    root = Path(ROOT)
    configs = [real_pointcept.config(root, model, a, dataset, tmp_path / str(a)) for a in (None, "standard", "quest")]
    stock, standard, quest = real_pointcept.train(root, *configs)
    assert len(stock.losses) == 16
    assert standard.losses == pytest.approx(stock.losses, abs=1.5e-4)  # they are printed with four decimals
    assert standard.mious == pytest.approx(stock.mious, abs=2e-3)
    assert standard.report.startswith("quest: attention=standard in 8 modules")
    assert quest.report.startswith("quest: attention=quest in 8 modules")
    assert quest.losses != stock.losses
    assert sum(quest.losses[8:]) < sum(quest.losses[:8])
    weight = f"weight={tmp_path / 'quest/exp/model/model_last.pth'}"
    other = real_pointcept.config(root, model, "standard", dataset, tmp_path / "start")
    (started,) = real_pointcept.train(root, other, options=(weight,))
    assert any("trained with attention 'quest' and is loaded into 'standard'" in line for line in started.lines)
    other = real_pointcept.config(root, model, "standard", dataset, tmp_path / "resume")
    with pytest.raises(RuntimeError, match="resume with model.backbone.attention='quest'"):
        real_pointcept.train(root, other, options=(weight, "resume=True"))
    same = real_pointcept.config(root, model, "quest", dataset, tmp_path / "same")
    (resumed,) = real_pointcept.train(root, same, options=(weight, "resume=True"))
    assert any("Resuming train at eval epoch: 2" in line for line in resumed.lines)


@pytest.mark.slow
def test_the_nuscenes_task(dataset, tmp_path, monkeypatch):
    options: ClassVar[dict] = {option["name"]: option["default"] for option in INFO["suites"][1]["options"]}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(real_pointcept.CPU), os.environ.get("PYTHONPATH", "")]))
    told = []
    shrunk = {**options, "batch_size": 2, "workers": 1}
    result = run_nuscenes(
        Cell("points/nuscenes", "val", "quest", 0, True, dataset, shrunk, tmp_path), lambda *note: told.append(note)
    )
    assert result.details["injected"].startswith("attention=quest in 22 modules")
    assert 0 <= result.metrics["miou"] <= 100
    assert told


# --- configurations ---------------------------------------------------------------------------------------------------


def test_every_configuration_is_read_by_pointcept(tmp_path):
    shutil.copytree(Path(ROOT) / "configs", tmp_path / "configs")
    for path in install_configs(tmp_path):
        backbone = Config.fromfile(str(path)).model.backbone
        assert backbone.attention
        assert backbone.type in ("PT-v3m1", "PT-v3m2")
