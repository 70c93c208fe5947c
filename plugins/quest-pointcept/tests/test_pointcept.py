"""Pointcept itself, from the checkout in QUEST_POINTCEPT_ROOT."""

import copy
import functools
import itertools
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from clouds import clouds
from conftest import ROOT

if not ROOT:
    pytest.skip(
        "needs a checkout of Pointcept whose requirements are installed; name it in QUEST_POINTCEPT_ROOT",
        allow_module_level=True,
    )

import real_pointcept
from outcomes import check
from pointcept.engines.defaults import default_config_parser
from pointcept.engines.hooks.misc import CheckpointLoader, PreciseEvaluator
from pointcept.engines.test import TESTERS, SemSegTester
from pointcept.models.builder import MODELS, build_model
from pointcept.models.litept import litept_v1
from pointcept.models.utils.structure import Point
from pointcept.utils import logger
from pointcept.utils.config import Config

import quest_core
import quest_pointcept  # noqa: F401
from devtools.logits import scalars
from quest_core import Mechanism
from quest_core.testing import AdapterConformance
from quest_pointcept import PointceptAdapter
from quest_suites.contract import Cell
from quest_suites.pointcept.own import run_own

SMALL = {
    "in_channels": 4, "order": ("z", "z-trans"), "stride": (2,), "enc_depths": (2, 2), "enc_channels": (24, 48),
    "enc_num_head": (2, 4), "enc_patch_size": (16, 16), "dec_depths": (2,), "dec_channels": (24,),
    "dec_num_head": (2,), "dec_patch_size": (16,), "drop_path": 0.1, "proj_drop": 0.1,
    "shuffle_orders": False,  # they are drawn in evaluation, too; the trainer's tests shuffle them
    "enable_flash": False,
}  # fmt: skip


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


class Pointcept(AdapterConformance, sites=6, refused=("aft-conv",)):
    adapter = PointceptAdapter()
    autocasts = False  # spconv has no bfloat16 on a CPU
    compiles = False  # and cannot be traced
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


class TestM1SmallCloud(Pointcept, variant=True):
    def make_inputs(self):
        return (data(70, 9, 33),)


class TestM1Relative(Pointcept, variant=True, refused=("linear", "aft-simple")):
    options: ClassVar[dict] = {"enable_rpe": True, "attn_drop": 0.1, "upcast_attention": True, "upcast_softmax": True}


class TestM1Classification(Pointcept, variant=True, sites=4):
    options: ClassVar[dict] = {"enc_mode": True}


class TestM2(Pointcept):
    name = "PT-v3m2"
    tolerance = 1e-4  # its gradients are sums of hundreds of rounded numbers
    options: ClassVar[dict] = {"layer_scale": 0.1, "mask_token": True, "traceable": True}

    def make_inputs(self):
        return ({**data(70, 45, 33), "mask": torch.arange(148) % 3 == 0},)


class TestM3(Pointcept, refused=("aft-simple", "aft-full")):
    name = "PT-v3m3"
    options: ClassVar[dict] = {"shift_coords": 0.5, "jitter_coords": 1.2, "rescale_coords": 1.2}


class TestM3HalfRotary(Pointcept, variant=True, refused=("aft-conv",)):
    name = "PT-v3m3"
    options: ClassVar[dict] = {"dec_rope_enable": False}


LITE = {
    "order": ("z", "z-trans"), "stride": (2,), "enc_depths": (1, 2), "enc_channels": (24, 48), "enc_num_head": (2, 4),
    "enc_patch_size": (16, 16), "enc_conv": (True, False), "enc_attn": (False, True), "enc_rope_freq": (100.0,) * 2,
    "dec_depths": (0,), "dec_channels": (24,), "dec_num_head": (2,), "dec_patch_size": (16,), "dec_conv": (False,),
    "dec_attn": (False,), "dec_rope_freq": (100.0,), "drop_path": 0.0,
    "shuffle_orders": False,
}  # fmt: skip


def flash(qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale):
    """flash-attn's call by LitePT, in loops: [S, 3, H, D] -> [S, H, D]."""
    outs = []
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        q, k, v = qkv[a:b].float().permute(1, 2, 0, 3)  # [H, N, D]
        outs.append(((q @ k.mT * softmax_scale).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def test_litept_trains_without_flash_attn(monkeypatch):
    """And `standard` is what flash-attn computes, in float32 where no flash kernel runs."""
    models = []
    for attention in ({}, {"attention": "standard"}, {"attention": "quest+gqa(ratio=2)"}):
        torch.manual_seed(0)
        models.append(MODELS.build({"type": "LitePT-v1", "in_channels": 4, **LITE, **attention}))
    stock, standard, quest = models
    points = data(70, 9, 33)
    with pytest.raises(ImportError, match="requires flash_attn"):
        stock(copy.copy(points))
    monkeypatch.setattr(litept_v1, "flash_attn", SimpleNamespace(flash_attn_varlen_qkvpacked_func=flash))
    found = []
    for model in (standard, stock):
        torch.manual_seed(1)  # the orders of a pooled stage are shuffled
        found.append(model(copy.copy(points)).feat)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    assert "kernel=buckets" in str(quest.attention_report)
    quest(copy.copy(points)).feat.square().sum().backward()
    assert all(p.grad is not None for p in quest.enc.enc1.block0.attn.parameters())


# --- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PT-v3m1", "PT-v3m2", "PT-v3m3"])
def test_a_config_asks_for_attention(name, log):
    model = build(name, attention={"name": "quest", "kv_heads": 2})
    assert "attention=quest+gqa(kv_heads=2) in 6 modules" in log.read_text()
    assert {str(m.config) for m in model.modules() if isinstance(m, Mechanism)} == {"quest+gqa(kv_heads=2)"}


def test_flash_is_not_needed():
    """Pointcept's own default refuses to be built without flash-attn; with an attention it runs, patches as there."""
    with pytest.raises(AssertionError, match="flash_attn is installed"):
        build("PT-v3m1", enable_flash=True)
    model = build("PT-v3m1", enable_flash=True, attention="standard").eval()
    assert all(site.module.packed for site in PointceptAdapter().sites(model))
    assert model(data(70, 9, 33)).feat.isfinite().all()


def test_a_misspelling_is_refused_through_the_registry():
    """Which builds from nested configurations and passes on what went wrong in its own words."""
    with pytest.raises(quest_core.ConfigError, match="did you mean 'quest'"):
        MODELS.build(segmentor("quset", type="PT-v3m1"))
    with pytest.raises(TypeError, match="DefaultSegmentorV2.*unexpected keyword argument 'attention'"):
        MODELS.build({**segmentor(None), "attention": "quest"})


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("attention", ["quest", "elliptical", "aft-simple", "quest+kdgqa(kv_heads=2)"])
def test_an_entry_without_points_changes_nothing(attention, flash):
    torch.manual_seed(0)
    model = build("PT-v3m1", enable_flash=flash, attention=attention).eval()
    whole = data(70, 33)
    want = model(copy.copy(whole)).feat
    got = model({**whole, "offset": torch.tensor([70, 103, 103])}).feat
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
def test_a_frozen_encoder_stays_frozen(attention):
    model = build("PT-v3m2", freeze_encoder=True, attention=attention)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("embedding.", "enc."))}


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)"])
def test_initialization_is_the_hosts(attention):
    """PT-v3m2 initializes every linear layer after building it; what replaces qkv has that spread, not PyTorch's."""
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


def test_patches_of_two_sizes_survive_a_copy():
    """Pointcept lays a decoder out with its encoder's patches; here each has its own.

    A Point rebuilds the mappings and lists in it whenever it is copied through its constructor.
    """
    point = build("PT-v3m1", dec_patch_size=(8,), attention="quest").eval()(data(70, 45))
    again = Point(point)
    assert again["quest_counts"] == point["quest_counts"]
    for key in ("quest_patches_16", "quest_patches_8"):
        assert again[key] is point[key]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def segmentor(attention, **options):
    backbone = {"type": "PT-v3m2", **SMALL, **({} if attention is None else {"attention": attention}), **options}
    criteria = [{"type": "CrossEntropyLoss", "loss_weight": 1.0, "ignore_index": -1}]
    sizes = {"num_classes": 3, "backbone_out_channels": 24}
    return {"type": "DefaultSegmentorV2", **sizes, "backbone": backbone, "criteria": criteria}


def build_segmentor(attention, **options):
    return build_model(segmentor(attention, **options))


def loader(path, attention, resume=False, model=None, batches=(), **options):
    """Pointcept's own CheckpointLoader before a training."""
    checkpoint = torch.load(path, weights_only=True)
    path = path.with_name("resumed.pth")
    torch.save({**checkpoint, "best_metric_value": 0.5, "optimizer": {}, "scheduler": {}}, path)
    cfg = SimpleNamespace(weight=str(path), resume=resume, enable_amp=False)
    trainer = SimpleNamespace(
        cfg=cfg,
        model=model or build_segmentor(attention),
        train_loader=batches,
        logger=logging.getLogger(__name__),
        optimizer=Mock(),
        scheduler=Mock(),
    )
    hook = CheckpointLoader(**options)
    hook.trainer = trainer
    hook.before_train()
    assert hook.trainer.__dict__.get("start_epoch") == (1 if resume else None)
    return trainer.model


def renamed(path, attention):
    """A backbone that was trained under another name, as Sonata's student."""
    checkpoint = torch.load(path, weights_only=True)
    weights = {k.replace("backbone.", "student.backbone."): v for k, v in checkpoint["state_dict"].items()}
    other = path.with_name("renamed.pth")
    torch.save({"epoch": 1, "state_dict": weights}, other)
    return loader(other, attention, keywords="module.student.backbone", replacement="module.backbone")


def of_the_tester(path, attention):
    """tools/test.py."""
    made = object.__new__(SemSegTester)
    made.logger = logging.getLogger(__name__)
    made.cfg = SimpleNamespace(model=segmentor(attention), weight=str(path), find_unused_parameters=False)
    return made.build_model()


def precise(path, attention):
    """PreciseEvaluator, which tests the best checkpoint at the end of a training."""
    (path.parent / "model").mkdir(exist_ok=True)
    shutil.copyfile(path, path.parent / "model/model_best.pth")
    hook, model = PreciseEvaluator(), build_segmentor(attention)
    hook.trainer = Mock(cfg=SimpleNamespace(test={}, save_path=str(path.parent)))
    with mock.patch.object(TESTERS, "build", return_value=Mock(model=model)):
        hook.after_train()
    return model


def with_lora(path, attention, **options):
    """The segmentor with LoRA, whose backbone loads its weights by itself."""
    kind = {"type": "DefaultLORASegmentorV2", "keywords": "module.", "replacements": "module.", "use_lora": True}
    return build_model({**segmentor(attention), **kind, "backbone_path": str(path), **options})


def lora(path, attention):
    model = with_lora(path, attention)
    model.backbone.enc = model.backbone.enc.unload()  # the names of the checkpoint again
    return model


def concerto(path, attention):
    """Concerto and Utonia go on from Sonata's student."""
    checkpoint = torch.load(path, weights_only=True)["state_dict"]
    student = {k.replace("backbone.", "module.student.backbone."): v for k, v in checkpoint.items()}
    other = path.with_name("sonata.pth")
    torch.save({"state_dict": student}, other)
    model = build_segmentor(attention)
    MODELS.get("Concerto-v1m1").load_sonata(None, model.backbone, str(other))
    return model


def plain(path, attention):
    model = build_segmentor(attention)
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    return model


LOADERS = {
    "`weight=`": loader,
    "`CheckpointLoader(strict=True)`": functools.partial(loader, strict=True),
    "`CheckpointLoader(keywords=, replacement=)`": renamed,
    "`weight= resume=True`": functools.partial(loader, resume=True),
    "`tools/test.py`": of_the_tester,
    "`PreciseEvaluator`": precise,
    "`DefaultLORASegmentorV2(backbone_path=)`": lora,
    "`load_sonata` of Concerto": concerto,
    "`load_state_dict`": plain,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_checkpoint_of_another_attention(name, tmp_path):
    check("Pointcept", name, LOADERS, build_segmentor, tmp_path)


def test_lora_learns_from_a_checkpoint(tmp_path):
    """Pointcept's own segmentor with LoRA: the backbone's weights arrive, and only the adapters and the head learn."""
    torch.manual_seed(0)
    trained = build("PT-v3m2", attention="quest")
    path = tmp_path / "model.pth"
    torch.save({"state_dict": trained.state_dict()}, path)
    model = with_lora(path, "quest", lora_r=2, lora_dropout=0.0, freeze_backbone=True)
    kept = model.backbone.enc.base_model.model.enc0.block0.attn.qkv.base_layer.weight
    torch.testing.assert_close(kept, trained.enc.enc0.block0.attn.qkv.weight)
    loss = model({**data(70, 45), "segment": torch.arange(115) % 3})["loss"]
    loss.backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name in learning if "lora_" not in name} == {"seg_head.weight", "seg_head.bias"}
    assert any("lora_" in name for name in learning)


# --- Config and log ---------------------------------------------------------------------------------------------------


CONFIG = """
custom_imports = dict(imports=["quest_pointcept"], allow_failed_imports=False)
model = dict(type="DefaultSegmentorV2", backbone=dict(type="PT-v3m1"{attention}))
data = dict(train=dict(loop=1))
resume, seed, epoch, eval_epoch = False, 0, 1, 1
save_path = "{folder}"
"""


@pytest.mark.parametrize(
    ("written", "options", "why"),
    [
        (', attention="quset"', None, "did you mean 'quest'"),
        ("", {"model.backbone.type": "SpUNet-v1m1", "model.backbone.attention": "quest"}, "not read by SpUNet-v1m1"),
    ],
)
def test_a_config_is_refused_before_a_file_is_written(written, options, why, tmp_path):
    folder = tmp_path / "exp"
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(attention=written, folder=folder))
    with pytest.raises(quest_core.ConfigError, match=why):
        default_config_parser(str(path), options)
    assert not folder.exists()
    path.write_text(CONFIG.format(attention=', attention="quest"', folder=folder))
    assert default_config_parser(str(path), {"model.backbone.attention_from": "standard"}).model.backbone.attention
    options = {"model.backbone.attention.ratio": 2}  # of a text
    assert default_config_parser(str(path), options).model.backbone.attention == {"name": "quest", "ratio": 2}
    assert (folder / "config.py").exists()


@pytest.mark.parametrize(
    ("attention", "options", "why"),
    [
        ({"name": "quest", "kv_heads": 3}, {}, "kv_heads is 3, which does not divide"),
        ("linear", {"enable_rpe": True}, "hides or weighs single pairs"),
    ],
)
def test_an_attention_that_does_not_fit_is_refused_before_a_file_is_written(attention, options, why):
    with pytest.raises(quest_core.QuestError, match=why):
        Config({"model": segmentor(attention, type="PT-v3m1", **options)})
    before = torch.get_rng_state()
    Config({"model": segmentor("quest")})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loader_calibrates_what_it_has_loaded(tmp_path, log):
    torch.save({"epoch": 1, "state_dict": build_segmentor(None).state_dict()}, tmp_path / "stock.pth")
    model = build_segmentor({"name": "quest", "calibrate": 2}, attention_from="standard")
    batch = {**data(70, 45), "segment": torch.arange(115) % 3}
    loader(tmp_path / "stock.pth", None, model=model, batches=[batch] * 3)
    assert "attention=quest calibrated in 6 modules" in log.read_text()


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Pointcept's logger, writing to its own file as a trainer sets it up."""
    monkeypatch.setattr(logger, "logger_initialized", {})
    monkeypatch.setattr(logging.getLogger("pointcept"), "handlers", [])
    logger.get_root_logger(log_file=str(tmp_path / "train.log"), file_mode="w")
    return tmp_path / "train.log"


def test_the_report_and_the_warning_are_in_the_log_of_pointcept(log, tmp_path):
    torch.save({"epoch": 1, "state_dict": build_segmentor(None).state_dict()}, tmp_path / "stock.pth")
    with pytest.warns(quest_core.AttentionMismatchWarning):
        loader(tmp_path / "stock.pth", "quest")
    lines = log.read_text().splitlines()
    (report,) = [line for line in lines if "attention=quest in 6 modules" in line]
    (warning,) = [line for line in lines if "were trained with standard attention" in line]
    assert "INFO" in report
    assert "WARNING" in warning


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nuscenes")
    real_pointcept.write_data(folder)
    return folder


def train_three(model, dataset, folder, **options):
    """Train without the plugin, with standard and with quest, each in its folder; return what they printed."""
    attentions = (None, "standard", "quest")
    configs = [real_pointcept.config(Path(ROOT), model, a, dataset, folder / str(a)) for a in attentions]
    return real_pointcept.train(Path(ROOT), *configs, **options)


@pytest.fixture(scope="module", params=real_pointcept.MODELS)
def trained(request, dataset, tmp_path_factory):
    """Return (model, folder, three runs of two epochs)."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, train_three(request.param, dataset, folder)


@pytest.mark.slow
def test_the_trainer(trained):
    """Standard is Pointcept's own attention, step by step; quest trains."""
    _, folder, (stock, standard, quest) = trained
    assert len(stock.losses) == 16
    assert standard.losses == pytest.approx(stock.losses, abs=1.5e-4)  # they are printed with four decimals
    assert standard.mious == pytest.approx(stock.mious, abs=2e-3)
    assert standard.report.startswith("attention=standard in 8 modules")
    assert quest.report.startswith("attention=quest in 8 modules")
    assert quest.report in (folder / "quest/exp/train.log").read_text()
    assert quest.losses != stock.losses
    assert sum(quest.losses[8:]) < sum(quest.losses[:8])
    for name, run in (("standard", standard), ("quest", quest)):
        watched = re.findall(r"Step (\d+) max_logit: ([\d.]+) entropy: [\d.]+", "\n".join(run.lines))
        assert [int(step) for step, _ in watched] == [1, 4, 8, 12, 16]
        board = scalars(folder / name / "exp")
        for step, top in watched:
            layers = [value for key, value in board[int(step)].items() if key.endswith("/max_logit/max")]
            assert len(layers) == 8
            assert float(top) == pytest.approx(max(layers), rel=1e-3)


@pytest.mark.slow
def test_the_checkpoints_of_the_trainer(trained, dataset, tmp_path):
    root, (model, folder, _) = Path(ROOT), trained
    weight = f"weight={folder / 'quest/exp/model/model_last.pth'}"
    other = real_pointcept.config(root, model, "standard", dataset, tmp_path / "other")
    for options in ((weight,), (weight, "resume=True")):
        with pytest.raises(RuntimeError, match="trained with attention 'quest', and the model has 'standard'"):
            real_pointcept.train(root, other, options=options)
    real_pointcept.train(root, other, options=(weight, "model.backbone.attention_from=quest"))
    stock_weight = f"weight={folder / 'None/exp/model/model_last.pth'}"
    start = real_pointcept.config(root, model, "quest", dataset, tmp_path / "start")
    (started,) = real_pointcept.train(root, start, options=(stock_weight,))
    warned = [line for line in started.lines if "WARNING" in line and "trained with standard attention" in line]
    assert len(warned) == 1
    assert warned[0] in (tmp_path / "start/exp/train.log").read_text()
    same = real_pointcept.config(root, model, "quest", dataset, tmp_path / "same")
    (resumed,) = real_pointcept.train(root, same, options=(weight, "resume=True"))
    assert any("Resuming train at eval epoch: 2" in line for line in resumed.lines)


@pytest.mark.slow
@pytest.mark.parametrize("model", real_pointcept.PRETRAINING)
def test_the_trainer_of_pretraining(model, dataset, tmp_path):
    """Sonata, Concerto and PPT: standard is Pointcept's own attention, step by step; quest trains."""
    stock, standard, quest = train_three(model, dataset, tmp_path)
    assert len(stock.losses) >= 6
    assert standard.losses == pytest.approx(stock.losses, abs=1.5e-3)
    assert quest.losses != stock.losses
    half = len(quest.losses) // 2
    assert sum(quest.losses[half:]) < sum(quest.losses[:half])
    assert standard.report.startswith("attention=standard in")
    assert quest.report.startswith("attention=quest in")


@pytest.mark.slow
@pytest.mark.timeout(900)  # three trainings of two processes, each of which imports Pointcept
def test_the_launcher_of_several_processes(dataset, tmp_path):
    """`--num-gpus 2`: the children, which never read the configuration's file, build and train what it asks for.

    Pointcept's launcher insists on CUDA and NCCL; without a GPU, tests/cpu gives it gloo. With GPUs it runs as it
    is in integration_tests/gpu/test_pointcept_launcher.py.
    """
    stock, standard, quest = train_three("PT-v3m1", dataset, tmp_path, gpus=2, options=("num_worker=2",))
    assert len(stock.losses) == 16
    assert standard.losses == pytest.approx(stock.losses, abs=1.5e-4)
    assert sum("] attention=quest in 8 modules" in line for line in quest.lines) == 2
    assert sum(quest.losses[8:]) < sum(quest.losses[:8])


@pytest.mark.slow
def test_the_suite_trains_nuscenes(dataset, tmp_path):
    reported = []
    options = {"gpus": 1, "set": " ".join(f"data.{s}.data_root={dataset}" for s in ("train", "val"))}
    task = "configs/nuscenes/semseg-pt-v3m1-0-base.py"
    given = Cell("pointcept", task, "quest", 0, True, Path(ROOT), options, tmp_path)
    result = run_own(given, lambda *note: reported.append(note))
    assert result.details["injected"].startswith("attention=quest in 5 modules")
    assert 0 <= result.metrics["mIoU"] <= 100
    assert reported
