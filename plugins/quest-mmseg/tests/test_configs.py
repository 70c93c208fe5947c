"""Configs: those of this plugin, those of mmseg's wheel, and what is refused in one before a file is written."""

import copy
import functools
import re
import shutil
import sys
import warnings
from collections import defaultdict
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import mmseg
import pytest
import torch
from conftest import sample, segmenter
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.runner import FlexibleRunner, Runner, amp
from mmseg.models import backbones
from mmseg.registry import MODELS
from mmseg.utils import register_all_modules

import quest_mmseg
from devtools.configs import with_start
from devtools.wrong import WRONG
from quest_core import Mechanism
from quest_core.errors import QuestError, UnsupportedError
from quest_core.hosts.adapter import sections
from quest_core.projections import Projected
from quest_mmseg.adapter import REFUSED, TYPES

HERE = Path(__file__)
MIM = Path(mmseg.__file__).parent / ".mim" / "configs"
CONFIGS = Path(quest_mmseg.__file__).parent / "configs"
SHIPPED = sorted(CONFIGS.glob("*.py"))
README = HERE.parents[1] / "README.md"
FORK = "onedl-mmsegmentation" in packages_distributions()["mmseg"]

# --- shipped --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_build(path):
    config = Config.fromfile(path)
    model = MODELS.build(config.model)
    assert len(model.attention_report.replacements) == {"laptop": 6}.get(path.stem.split("_")[1], 14)
    if "vit" in path.stem:
        assert (config.train_cfg.max_iters, config.param_scheduler[0].type) == (160000, "PolyLR")
        assert config.optim_wrapper.optimizer == {"type": "SGD", "lr": 0.001, "momentum": 0.9, "weight_decay": 0.0}
        assert config.model.data_preprocessor.mean == [123.675, 116.28, 103.53]
        assert config.model.data_preprocessor.size == (512, 512)
        assert config.model.backbone.patch_bias


@pytest.mark.parametrize("variables", [("WORLD_SIZE",), ("SLURM_NTASKS", "--launcher=slurm")], ids=" ".join)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_keep_the_images_of_an_iteration(path, variables, monkeypatch):
    images = 16 if "laptop" in path.stem else 8
    variable, *arguments = variables
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    for processes in (1, 2, 4, 8):
        monkeypatch.setenv(variable, str(processes))
        assert Config.fromfile(path).train_dataloader.batch_size * processes == images
    monkeypatch.setenv(variable, "3")
    with pytest.raises(ValueError, match="among 3 processes; start 1, 2, 4"):
        Config.fromfile(path)


@pytest.mark.parametrize("path", [p for p in SHIPPED if "init=" in p.read_text()], ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path):
    register_all_modules()
    for base in CONFIGS.glob("*.py"):  # a config's _base_ is its neighbor
        shutil.copy(base, tmp_path)
    (tmp_path / path.name).write_text(with_start(path))
    model = MODELS.build(Config.fromfile(tmp_path / path.name).model)
    model.init_weights()
    parts = [module for module in model.modules() if isinstance(module, Projected)]
    assert len(parts) in (6, 14)
    norms = torch.cat([part.projections.norms(part, part.head_sizes, "q") for part in parts])
    torch.testing.assert_close(norms, torch.full_like(norms, 12), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scale"), [("float16", "dynamic"), ("bfloat16", 1.0)])
def test_half_precision_trains(dtype, scale, monkeypatch):
    """As with `--amp`, on images of 64x64.

    mmengine's AmpOptimWrapper wants an accelerator, and its autocast on a CPU bfloat16. PyTorch's own autocast and
    GradScaler for the CPU, which know both types, stand in for those of CUDA.
    """
    register_all_modules()
    monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, "GradScaler", functools.partial(torch.amp.GradScaler, "cpu"))
    monkeypatch.setattr(amp, "autocast", functools.partial(torch.autocast, "cpu"))
    config = Config.fromfile(SHIPPED[-1])
    config.model.data_preprocessor.size = config.model.backbone.img_size = (64, 64)
    torch.manual_seed(0)
    model, dtypes = MODELS.build(config.model), set()
    model.init_weights()
    for module in model.modules():
        if isinstance(module, Mechanism):
            module.register_forward_pre_hook(lambda _, given: dtypes.add(given[0].dtype))
    half = {"type": "AmpOptimWrapper", "dtype": dtype, "loss_scale": scale}
    wrapper = build_optim_wrapper(model, {**config.optim_wrapper, **half})
    data = {"inputs": [torch.randint(255, (3, 64, 64))] * 2, "data_samples": [sample((64, 64), 150)] * 2}
    losses = [model.train_step(data, wrapper)["decode.loss_ce"].item() for _ in range(4)]
    assert dtypes == {getattr(torch, dtype)}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert losses[-1] < losses[0]


# --- the wheel's ----------------------------------------------------------------------------------------------------

BUILT = {"DAHead", "ANNHead", "ISAHead", "OCRHead", "MSCAN", "SVT"}
"""Types of configs with a module inside that is in `REFUSED`; the others in `REFUSED` are types of configs."""
FIRST = {"san": "san-vit-b16_coco", "segformer": "segformer_mit-b0", "swin": "swin-tiny", "setr": "setr_vit-l_naive"}


def types(path):
    """Every `type` inside the model of a config."""
    return {part.get("type") for _, part in sections(Config.fromfile(path).model)}


def of_the_wheel():
    """The configs with attention, by folder; those of Twins in two groups."""
    found = defaultdict(list)
    for path in sorted(MIM.glob("[!_]*/*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            named = types(path)
        if named & (TYPES - {"EncoderDecoder", "CascadeEncoderDecoder", "DepthEstimator"} | BUILT | REFUSED.keys()):
            found[path.stem.partition("-")[0] if path.parent.name == "twins" else path.parent.name].append(path)
    return found


def verdict(path):
    """ "✓", or why `attention="quest"` is refused in a config, made smaller."""
    if refused := types(path) & REFUSED.keys():
        return REFUSED[refused.pop()]
    config = Config.fromfile(path).model
    backbone = config.get("backbone") or config.image_encoder
    config.pretrained = backbone.init_cfg = None
    if isinstance(backbone.get("num_layers"), int) and "text_encoder" not in config:
        backbone.update(num_layers=4, out_indices=(0, 1, 2, 3))
    config.type, config.attention = f"quest_mmseg.{config.type}", "quest"
    try:
        report = MODELS.build(config).attention_report
    except UnsupportedError as error:
        return str(error).partition("): ")[2].partition(". Name it")[0]
    assert not set(report.left_alone) - {p for p in report.left_alone if "pixel_decoder" in p}
    return "✓"


@pytest.mark.slow
def test_the_table_of_the_wheels_configs():
    """README.md says of every config of mmsegmentation 1.2.2 with attention whether it takes another, or why not."""
    found = defaultdict(list)
    for group, paths in of_the_wheel().items():
        first = next((path for path in paths if path.name.startswith(FIRST.get(group, ""))), paths[0])
        found[verdict(first)].append(f"{group} {len(paths)}")
    taken = found.pop("✓")
    rows = [f"| {', '.join(taken)} | ✓ |", *(f"| {', '.join(groups)} | {why} |" for why, groups in found.items())]
    text = README.read_text()
    if not FORK:
        missing = [row for row in rows if row not in text]
        assert not missing, "write into README.md:\n" + "\n".join(rows)
    assert len(taken) >= 12


# --- what is wrong --------------------------------------------------------------------------------------------------

NO = "has no attention; write dict(type='quest_mmseg.EncoderDecoder', attention='quest', ...)"
VIT, STOCK = {"type": "quest_mmseg.VisionTransformer"}, {"type": "EncoderDecoder"}
OWN: list[tuple[dict[str, Any], str]] = [
    ({}, NO),
    ({"attention": None}, NO),
    ({"attention": "None"}, NO),
    ({"attention": "none"}, NO),
    ({"atention": "quest"}, "has no option 'atention'; did you mean 'attention'?"),
    ({"attention": "quest+gqa(kv_heads=3)"}, "kv_heads is 3, which does not divide the 4 heads"),
    ({"attention": "aft-conv(dims=1)"}, "dims is 1, and patches have 2 axes"),
    ({"attention": "aft-conv(prefix=1)"}, "the model sets the grid and the class tokens"),
    ({"attention": "quest", "kv_heads": 2}, "write attention={'name': 'quest', 'kv_heads': 2}"),
    ({"attention": "quest", "atention_from": "quest"}, "did you mean 'attention_from'"),
    ({"backbone": {**VIT, "attention": "qest"}}, "did you mean 'quest'"),
    ({"attention": "quest", "backbone": {**VIT, "attention": "linear"}}, "named twice: 'quest' for"),
    ({"allow_partial": True, "backbone": {**VIT, "attention": "quest"}}, "allow_partial=True is given without"),
    (
        {**STOCK, "attention": "quest"},
        "mmseg's EncoderDecoder does not read it; write model.type='quest_mmseg.EncoderDecoder' too (--cfg-options",
    ),
    (
        {**STOCK, "backbone": {"type": backbones.VisionTransformer, "attention": "quest"}},
        "model.backbone.attention is 'quest', and mmseg's VisionTransformer does not read it",
    ),
    (
        {**STOCK, "decode_head": {"type": "MaskFormerHead", "attention": "quest"}},
        "model.decode_head.attention is 'quest', and mmseg's MaskFormerHead does not read it",
    ),
    (
        {"attention": "quest", "auxiliary_head": [{"type": "mmseg.Mask2FormerHead", "attention": "sigmoid"}]},
        "auxiliary_head.0.attention is 'sigmoid', and mmseg's Mask2FormerHead does not read it",
    ),
    (
        {"attention": "quest", "backbone": {"attention": "qnorm"}},
        "write model.backbone.type='quest_mmseg.VisionTransformer' too (--cfg-options model.backbone.type=",
    ),
]
UNREAD = "top level of the config, where nothing reads it; the model has {}; write model.attention"
TOP: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # the model, the top level
    (STOCK, {"attention": "quest"}, UNREAD.format("mmseg's own attention")),
    ({"attention": "standard"}, {"attention": "quest"}, UNREAD.format("attention 'standard'")),
    ({"attention": "quest"}, {"attention": "quset"}, "did you mean 'quest'"),
    (
        STOCK,
        {"backbone": {"attention": "quest"}},  # of a command line
        "backbone.attention is 'quest', which nothing reads; write model.attention='quest', or model.backbone.att",
    ),
]


@pytest.mark.parametrize(("options", "top", "why"), [*((one, {}, why) for one, why in [*OWN, *WRONG]), *TOP])
def test_a_wrong_key_is_one_error_before_a_folder_is_made(options, top, why, tmp_path):
    model, work = copy.deepcopy(segmenter(type="quest_mmseg.EncoderDecoder")), tmp_path / "work"
    for key, value in options.items():
        model[key] = {**model[key], **value} if isinstance(value, dict) and key == "backbone" else value
    parts = {"work_dir": str(work), "default_scope": "mmseg", "default_hooks": {}, "launcher": "none"}
    for kind in (Runner, FlexibleRunner):
        with pytest.raises(QuestError) as raised:
            kind.from_cfg(Config({"model": model, **parts, **top}))
        assert why in str(raised.value) or re.search(why, str(raised.value))
    assert not work.exists()
