"""What users touch: `attention` in torch-pointcloud, training, checkpoints, every mechanism, child processes."""

from __future__ import annotations

import copy
import errno
import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import subprocess
import sys
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from clouds import clouds
from spawned import Config, torch_pointcloud_model
from stand_in import Stages, serialized
from torch import nn
from torch_pointcloud import create_model
from torch_pointcloud.models.concerto import ConcertoSegmentation
from torch_pointcloud.models.point_transformer_v3 import (
    PointTransformerV3Classification,
    PointTransformerV3Encoder,
    PointTransformerV3Segmentation,
)
from torch_pointcloud.models.sonata import SonataSegmentation
from torch_pointcloud.models.utonia import UtoniaSegmentation

import quest_core
import quest_pointcept
from quest_core import AttentionMismatchWarning, ConfigError, Mechanism, UnsupportedError
from quest_core.mechanisms import elliptical
from quest_core.registry import mechanisms as registered
from quest_pointcept import PointceptAdapter
from quest_pointcept.configs import HERE as CONFIGS
from quest_pointcept.configs import install_configs
from quest_pointcept.hosts import build, check, reduce

ENCODER = {
    "in_channels": 4,
    "strides": (2,),
    "encoder_depths": (2, 2),
    "encoder_channels": (16, 32),
    "encoder_num_heads": (2, 4),
    "encoder_patch_size": (8, 8),
    "drop_path": 0.0,
    "use_flash_attn": False,
}
SEGMENTATION = {
    **ENCODER,
    "num_classes": 5,
    "decoder_depths": (1,),
    "decoder_channels": (16,),
    "decoder_num_heads": (2,),
    "decoder_patch_size": (8,),
}


def mechanisms(model):
    return [part for part in model.modules() if isinstance(part, Mechanism)]


# --- torch-pointcloud, end to end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attention", ["standard", "quest", "quest+gqa(kv_heads=1)", "aft-local(max_length=8, window=3, rank=4)"]
)
def test_forward_backward_training_and_a_checkpoint(attention, tmp_path):
    torch.manual_seed(0)
    model = PointTransformerV3Segmentation(**SEGMENTATION, attention=attention)
    assert [str(m.config) for m in mechanisms(model)] == [str(quest_core.AttentionConfig.parse(attention))] * 5
    x, grid, batch = clouds(60, 45, 5)
    label = (grid[:, 0] > 7).long() + 2 * (grid[:, 1] > 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x, grid, batch), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    trained = dict(model.named_parameters())
    still = [name for name, p in trained.items() if torch.equal(p, before[name]) and "attn" in name]
    assert still == []
    model.eval()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    again = PointTransformerV3Segmentation(**SEGMENTATION, attention=attention).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttentionMismatchWarning)
        again.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True), strict=True)
    torch.manual_seed(1)  # the orders are shuffled in evaluation, too
    want = model(x, grid, batch)
    torch.manual_seed(1)
    torch.testing.assert_close(again(x, grid, batch), want)


@pytest.mark.parametrize(
    ("kind", "options", "sites"),
    [
        (PointTransformerV3Encoder, ENCODER, 4),
        (PointTransformerV3Classification, {**ENCODER, "num_classes": 3}, 4),
        (SonataSegmentation, {**ENCODER, "num_classes": 3}, 4),
        (ConcertoSegmentation, {**ENCODER, "num_classes": 3}, 4),
        (UtoniaSegmentation, {**ENCODER, "encoder_channels": (24, 48), "num_classes": 3}, 4),
    ],
)
def test_every_model_takes_the_key(kind, options, sites, capsys):
    model = kind(**options, attention="quest")
    assert len(mechanisms(model)) == sites
    shown = capsys.readouterr().err
    assert shown.count("attention=quest in 4 modules") == 1
    assert str(model.attention_report) in shown


def test_the_registry_of_models_takes_the_key():
    model = create_model("ptv3-base.scannet20.pointcept", attention="quest")  # whose default is flash-attn
    sites = list(PointceptAdapter().sites(model))
    assert len(sites) == 22
    assert all(site.module.packed for site in sites)


def test_a_misspelling_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match="did you mean 'quest'"):
        PointTransformerV3Encoder(**ENCODER, attention="quset")


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (3, "attention is 3 .int.; write a name such as 'quest'"),
        (True, "attention is True .bool.; write a name"),
        (["quest"], "attention is .'quest'. .list.; write a name"),
        ({"nme": "quest"}, "has no 'name'"),
        ({"name": "quest", "scal": 2}, "'quest' has no option 'scal'.*did you mean 'scale'"),
        ("quest+gqa(kv_heads=3)", "kv_heads is 3, which does not divide the 2 heads; choose from: 1, 2"),
    ],
)
def test_what_is_no_attention_is_refused(attention, why):
    with pytest.raises(ConfigError, match=why):
        PointTransformerV3Encoder(**ENCODER, attention=attention)


def test_the_plugin_may_be_imported_again():
    wrapped = PointTransformerV3Encoder.__init__
    importlib.reload(quest_pointcept)
    PointceptAdapter().install()
    assert PointTransformerV3Encoder.__init__ is wrapped


def test_the_hosts_own_call_is_unchanged():
    torch.manual_seed(0)
    model = PointTransformerV3Encoder(**ENCODER)
    assert mechanisms(model) == []


# --- without flash-attn -----------------------------------------------------------------------------------------------


def test_flash_is_not_needed():
    """The default of torch-pointcloud cannot be built without flash-attn; with an attention it can and runs."""
    with pytest.raises(ImportError, match="flash_attn"):
        PointTransformerV3Segmentation(**{**SEGMENTATION, "use_flash_attn": True})
    torch.manual_seed(0)
    model = PointTransformerV3Segmentation(**{**SEGMENTATION, "use_flash_attn": True}, attention="standard").eval()
    torch.manual_seed(0)
    stock = PointTransformerV3Segmentation(**SEGMENTATION).eval()
    whole = clouds(64, 40)  # no cloud smaller than a patch: there both layouts are the same
    torch.manual_seed(1)
    want = stock(*whole)
    torch.manual_seed(1)
    torch.testing.assert_close(model(*whole), want, rtol=1e-5, atol=1e-5)


def test_with_flash_a_small_cloud_is_a_shorter_patch():
    """torch-pointcloud fills it up to a whole patch with copies of its points only without flash."""
    encoder = PointTransformerV3Encoder(**{**ENCODER, "use_flash_attn": True}, attention="standard")
    attention, x = encoder.blocks[0].blocks[0].attn, torch.randn(5, 16)
    q, k, v = attention.qkv(x).unflatten(1, (3, 2, 8)).permute(1, 2, 0, 3)  # [H, N, D]
    attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(attention(x, None, torch.zeros(5, dtype=torch.long)), attention.proj(attended))


@pytest.mark.parametrize("option", [{"attn_kind": "rpe"}, {"upcast_attn": True}, {"upcast_softmax": True}])
def test_what_flash_excludes_is_refused(option):
    with pytest.raises(UnsupportedError, match="has no fused kernel; build with use_flash_attn=False"):
        PointTransformerV3Segmentation(**{**SEGMENTATION, "use_flash_attn": True, **option}, attention="quest")


def test_a_small_cloud_attends_to_itself_alone():
    """With its own length, a small cloud gives the same in a batch of one and with others."""
    torch.manual_seed(0)
    model = quest_core.inject(Stages(enable_flash=True), "quest", adapter=PointceptAdapter())[0].eval()
    x, grid, batch = clouds(40, 5)
    small = batch == 1
    together = model(x, grid, batch)[-2:]
    alone = model(x[small], grid[small], batch[small] - 1)[-2:]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "flash", "half"),
    [("quest", True, True), ("quest", False, False), ("aft-full(max_length=8)", False, False)],
)
def test_half_precision_on_a_gpu_is_only_for_the_hosts_flash_path(attention, flash, half, monkeypatch):
    """Also where learned positions keep the patches that flash would have, without flash."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    model = quest_core.inject(Stages(enable_flash=flash), attention, adapter=PointceptAdapter())[0]
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no CUDA here
        for site in PointceptAdapter().sites(model):
            assert isinstance(site.module._precision(on_gpu), torch.autocast) == half


# --- every mechanism --------------------------------------------------------------------------------------------------

NEEDS = {
    "gqa": "(kv_heads=2)",
    "kdgqa": "(kv_heads=2)",
    "dgqa": "(kv_heads=2)",
    "pgqa": "(kv_heads=2)",
    "aft-conv": "(dims=1, window=5)",
}
SCORES = [part.name for part in registered().values() if part.axis == "score"]
NORMALISERS = [part.name for part in registered().values() if part.axis == "normalizer"]
GROUPINGS = [part.name for part in registered().values() if part.axis == "grouping"]
FAMILIES = [part.name for part in registered().values() if part.axis == "family"]


def spelt(name):
    return name + NEEDS.get(name, "")


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", [*SCORES, *(f"quest+{name}" for name in NORMALISERS + GROUPINGS), *FAMILIES])
def test_every_mechanism_trains(name, flash):
    head, _, tail = name.partition("+")
    attention = f"{head}+{spelt(tail)}" if tail else spelt(name)
    torch.manual_seed(0)
    stages = Stages(enable_flash=flash, heads=(4, 4))
    model = quest_core.inject(stages, attention, adapter=PointceptAdapter(), fresh=True)[0]
    out = model(*clouds(37, 12, 6))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for name, p in model.named_parameters())


@pytest.mark.parametrize("score", ["standard", "quest", "qknorm", "elliptical-quest"])
@pytest.mark.parametrize("normalizer", NORMALISERS)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_axes_combine(score, normalizer, grouping):
    attention = f"{score}+{normalizer}+{spelt(grouping)}"
    torch.manual_seed(0)
    model = quest_core.inject(Stages(enable_flash=True, heads=(4, 4)), attention, adapter=PointceptAdapter())[0]
    model(*clouds(20, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("attention", "options", "why"),
    [
        ("aft-conv", {}, r"lie on a line; write aft-conv\(dims=1\)"),
        ("aft-conv(dims=1, prefix=1)", {}, "without grid and prefix"),
        ("aft-local(max_length=7)", {}, r"patches have 8 points and max_length is 7; write aft-local\(max_length=8\)"),
        ("aft-simple", {"enable_rpe": True}, "relative position bias is added to scores"),
        ("linear", {"enable_rpe": True}, "relative position bias is added to scores"),
        ("aft-full", {"rotary": True}, "queries do not meet keys, where rotary positions act"),
        ("linear", {"attn_drop": 0.1}, "no weights for the attention dropout"),
    ],
)
def test_what_cannot_be_is_refused_by_name(attention, options, why):
    with pytest.raises(UnsupportedError, match=f"{why}.*Possible here: .*quest"):
        quest_core.inject(Stages(**options), attention, adapter=PointceptAdapter())


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="kv_heads is 3"):
        quest_core.inject(Stages(), "gqa(kv_heads=3)", adapter=PointceptAdapter())


def test_pooled_keys_cannot_be_spread_again():
    model = quest_core.inject(Stages(), "quest+gqa(kv_heads=2)", adapter=PointceptAdapter())[0]
    with pytest.raises(quest_core.InputError, match="its keys and values were reduced already. Build the model again"):
        quest_core.inject(model, "quest", adapter=PointceptAdapter())
    quest_core.inject(model, "standard+gqa(kv_heads=2)", adapter=PointceptAdapter())


def test_learned_positions_see_patches_of_one_size():
    """Without flash the host's patches shrink to the smallest cloud; positions would then mean something else."""
    torch.manual_seed(0)
    model = quest_core.inject(Stages(patch_size=8), "aft-full(max_length=8)", adapter=PointceptAdapter())[0].eval()
    x, grid, batch = clouds(40, 5)
    large = batch == 0
    together, alone = model(x, grid, batch), model(x[large], grid[large], batch[large])
    torch.testing.assert_close(together[:20], alone, rtol=1e-5, atol=1e-5)


# --- elliptical -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flash", [False, True])
def test_elliptical_compares_each_point_with_itself(flash, monkeypatch):
    """Blocks follow other curves, so a point lies in another patch; its values are still compared with its own."""
    torch.manual_seed(0)
    model = quest_core.inject(Stages(enable_flash=flash), "elliptical", adapter=PointceptAdapter())[0].double().eval()
    first, second = (model.enc0[name].attn for name in ("block0", "block1"))
    values, got = {}, {}
    for name, attention in (("before", first), ("own", second)):
        attention.qkv.register_forward_hook(
            lambda module, given, out, name=name: values.update({name: out[:, 48:].unflatten(1, (4, 6))})
        )
    metric = elliptical._metric
    x, grid, batch = clouds(37, 12, 6)

    def spy(*values, **masked):
        got["metric"] = metric(*values, **masked)
        return got["metric"]

    monkeypatch.setattr(elliptical, "_metric", spy)  # the first block has nothing to compare with
    point = serialized(model.stem(x.double()), grid, batch)
    model.enc0["block1"](model.enc0["block0"](point))
    size = 8 if flash else 6
    order = point.serialized_order[1]
    change = (values["own"] - values["before"]).abs()  # [N, H, D]
    row = 0
    for begin, end in ((0, 37), (37, 49), (49, 55)):
        for start in range(begin, end, size):
            held = list(range(start, min(start + size, end)))
            if end - begin > size:
                held += range(start + len(held) - size, start)
            mean = change[order[held]].mean(0)  # [H, D]
            torch.testing.assert_close(got["metric"][row, :, 0], mean / mean.amax(-1, keepdim=True))
            row += 1
    assert row == len(got["metric"])


def test_elliptical_is_plain_at_the_border_of_a_stage():
    """Also where the next stage happens to have the same numbers of points, heads and features."""
    torch.manual_seed(0)
    model = quest_core.inject(Stages(heads=(4, 4), alike=True), "elliptical", adapter=PointceptAdapter())[0]
    follows = [site.module.mechanism.score._previous[0] is not None for site in PointceptAdapter().sites(model)]
    assert follows == [False, True, False, True]


def test_elliptical_needs_two_blocks_in_a_stage():
    with pytest.raises(quest_core.InjectionError, match="no layer follows another"):
        PointTransformerV3Encoder(**{**ENCODER, "encoder_depths": (1, 1)}, attention="elliptical")


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
def test_what_was_frozen_stays_frozen(attention):
    stages = Stages(heads=(4, 4))
    stages.enc0.requires_grad_(False)
    model = quest_core.inject(stages, attention, adapter=PointceptAdapter())[0]
    assert not any(p.requires_grad for p in model.enc0.parameters())
    assert all(p.requires_grad for p in model.enc1.parameters())


def test_a_wrapped_qkv_is_kept():
    """LoRA wraps qkv; an attention of the same shape keeps the wrapper, one of another shape says what to do."""

    class Wrapped(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.extra = nn.Parameter(torch.zeros(base.out_features))

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, x):
            return self.base_layer(x) + self.extra

    stages = Stages()
    for site in PointceptAdapter().sites(stages):
        site.module.qkv = Wrapped(site.module.qkv)
    with pytest.raises(UnsupportedError, match=r"weights of 'qkv' .Wrapped. are parametrized.*choose the attention"):
        quest_core.inject(stages, "quest+gqa(kv_heads=1)", adapter=PointceptAdapter())
    model = quest_core.inject(stages, "quest", adapter=PointceptAdapter())[0]
    model(*clouds(20, 9)).square().sum().backward()
    assert all(site.module.qkv.extra.grad.abs().sum() > 0 for site in PointceptAdapter().sites(model))


def test_a_stock_checkpoint_is_pooled_on_load():
    torch.manual_seed(0)
    stock, model = Stages(), Stages()
    quest_core.inject(model, "standard+gqa(kv_heads=2)", adapter=PointceptAdapter(), attention_from="standard")
    model.load_state_dict(stock.state_dict(), strict=True)
    theirs, ours = stock.enc0["block0"].attn.qkv.weight, model.enc0["block0"].attn.qkv.weight
    q, k, v = theirs.view(3, 4, 6, 24)
    pooled = [part.view(2, 2, 6, 24).mean(1).flatten(0, 1) for part in (k, v)]
    torch.testing.assert_close(ours, torch.cat([q.flatten(0, 1), *pooled]))


def test_the_keys_of_aft_conv_are_pooled_on_load():
    """One feature a head: the mean of the host's. Loading before injecting, or after, comes to the same."""
    torch.manual_seed(0)
    stock = Stages()
    model = quest_core.inject(
        Stages(), "aft-conv(dims=1, window=5)", adapter=PointceptAdapter(), attention_from="standard"
    )[0]
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert unexpected == []
    assert all(".mechanism." in name for name in missing)
    q, k, v = stock.enc0["block0"].attn.qkv.weight.detach().view(3, 4, 6, 24)
    want = torch.cat([q.flatten(0, 1), k.mean(1), v.flatten(0, 1)])
    torch.testing.assert_close(model.enc0["block0"].attn.qkv.weight.detach(), want)
    quest_core.inject(stock, "aft-conv(dims=1, window=5)", adapter=PointceptAdapter())
    torch.testing.assert_close(stock.enc0["block0"].attn.qkv.weight.detach(), want)


@pytest.mark.parametrize("other", ["quest+gqa(kv_heads=1)", "aft-conv(dims=1)"])
def test_weights_of_another_shape_are_refused(other):
    """Also if attention_from accepts them and the loader is not strict."""
    trained = quest_core.inject(Stages(), other, adapter=PointceptAdapter())[0]
    model = quest_core.inject(Stages(), "quest+gqa(kv_heads=2)", adapter=PointceptAdapter(), attention_from=other)[0]
    with pytest.raises(RuntimeError, match=r"size mismatch for enc0.block0.attn.qkv.weight"):
        model.load_state_dict(OrderedDict(trained.state_dict().items()), strict=False)


def test_calibration_scales_the_queries():
    torch.manual_seed(0)
    model = quest_core.inject(Stages(), "standard", adapter=PointceptAdapter())[0].eval()
    _, report = quest_core.calibrate(model, [clouds(40, 20), clouds(30)], forward=lambda m, batch: m(*batch))
    assert len(report.layers) == 4
    assert {str(m.config) for m in mechanisms(model)} == {"quest"}


# --- Pointcept's Config ----------------------------------------------------------------------------------------------


class Backbone:
    def __init__(self, attention=None):
        pass


class Segmentor:
    def __init__(self, backbone=None):
        pass


REGISTRY = {"PT-v3m1": Backbone, "Other": Backbone, "Segmentor": Segmentor}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"attention": "quest"}, "^attention='quest' is not read by Pointcept; .* as in model.backbone.attention"),
        ({"backbone": {"attention": "quest"}}, "^backbone.attention='quest' is not read by Pointcept"),
        ({"attention_from": "standard"}, "^attention_from='standard' is not read"),
        ({"model": {"type": "Segmentor", "attention": "quest"}}, "^model.attention='quest' is not read by Segmentor"),
        ({"model": {"parts": [{"type": Segmentor, "attention": "quest"}]}}, "^model.parts.0.attention='quest'"),
        ({"model": {"backbone": {"type": "PT-v3m1", "attention": "quset"}}}, "did you mean 'quest'"),
        ({"model": {"backbone": {"type": "PT-v3m1", "attention": "quest(inti=5)"}}}, "did you mean 'init'"),
        ({"model": {"backbone": {"type": "PT-v3m1", "attention": "quest(init=no)"}}}, "init"),
        (
            {"model": {"backbone": {"type": "PT-v3m1", "atention": "quest"}}},
            "no option 'atention'; did you mean 'attention'",
        ),
        (
            {"model": {"backbone": {"type": "PT-v3m1", "attention_from": "quest"}}},
            "^model.backbone: attention_from='.*' is given without",
        ),
        (
            {"model": {"backbone": {"type": "PT-v3m1", "attention": "quest", "attention_from": "standrad"}}},
            "did you mean 'standard'",
        ),
    ],
)
def test_a_config_is_refused_before_anything_is_built(config, why):
    with pytest.raises(ConfigError, match=why):
        check(config, REGISTRY)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model": {"type": "Segmentor", "backbone": {"type": "PT-v3m1", "attention": "quest"}}, "hooks": [{"type": 1}]},
        {"model": {"backbone": {"type": "PT-v3m1", "attention": {"name": "quest"}, "attention_from": "standard"}}},
        {"model": {"backbone": {"type": "PT-v3m1", "attention": None}}},
        {"model": {"backbone": {"type": "Other", "attention": "its own"}}},
        {"model": {"type": "Segmentor", "image": {"attention": "what an image encoder reads"}}},
        {"data": {"type": "Dataset", "attention": "its own"}},
    ],
)
def test_other_configs_are_left_to_their_readers(config):
    check(config, REGISTRY)


# --- install and uninstall -------------------------------------------------------------------------------------------


def test_after_uninstall_a_model_is_stock():
    adapter = PointceptAdapter()
    adapter.uninstall()
    try:
        assert mechanisms(PointTransformerV3Encoder(**ENCODER)) == []
        with pytest.raises(TypeError, match="attention"):
            PointTransformerV3Encoder(**ENCODER, attention="quest")
        assert "attention" not in inspect.signature(PointTransformerV3Encoder).parameters
    finally:
        adapter.install()
    assert len(mechanisms(PointTransformerV3Encoder(**ENCODER, attention="quest"))) == 4


@pytest.mark.parametrize("options", [{"attention_from": "standard"}, {"allow_partial": True}])
def test_a_key_without_attention_is_refused(options):
    with pytest.raises(ConfigError, match="PointTransformerV3Encoder: .* is given without attention"):
        PointTransformerV3Encoder(**ENCODER, **options)


def test_a_misspelt_attention_from_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match="did you mean 'standard'"):
        PointTransformerV3Encoder(**ENCODER, attention="quest", attention_from="standrad")


def test_an_attention_that_is_not_replaced_needs_allow_partial():
    """A user's own encoder that mixes another attention into a stage."""

    class OtherAttention(nn.Module):
        pass

    class Encoder(nn.Module):
        def __init__(self, use_flash_attn=False):
            super().__init__()
            self.stages = Stages()
            self.mixer = OtherAttention()

    adapter = PointceptAdapter()
    adapter.install()
    adapter.patches.around(Encoder, "__init__", functools.partial(build, adapter))
    with pytest.raises(quest_core.InjectionError, match="'mixer' .OtherAttention.*allow_partial=True"):
        Encoder(attention="quest")
    assert Encoder(attention="quest", allow_partial=True).attention_report.left_alone == ("mixer",)


# --- child processes and configurations -------------------------------------------------------------------------------


def test_a_spawned_child_knows_the_plugin():
    """The Config that it is handed imports the plugin, though the child never imported it."""
    PointceptAdapter.patches.put(Config, "__reduce__", reduce)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=torch_pointcloud_model, args=(Config(**ENCODER, attention="quest"), answers))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    known, report = answers.get()
    assert known
    assert report.startswith("attention=quest in 4 modules")


def test_every_configuration_is_its_base_and_three_lines(tmp_path):
    paths = sorted(CONFIGS.glob("*/*.py"))
    assert {path.parent.name for path in paths} == {"nuscenes", "scannet", "s3dis", "waymo"}
    for path in paths:
        assert len([line for line in path.read_text().splitlines() if not line.startswith("#")]) == 3
        scope: dict = {}
        exec(path.read_text(), scope)
        assert scope["custom_imports"] == {"imports": ["quest_pointcept"], "allow_failed_imports": False}
        attention = quest_core.AttentionConfig.parse(scope["model"]["backbone"]["attention"])
        (base,) = scope["_base_"]
        assert path.stem.startswith(os.path.splitext(base)[0].removeprefix("./"))
        assert path.stem.removesuffix(attention.name.replace("+", "-")) != path.stem
    with pytest.raises(ConfigError, match="is it Pointcept's checkout"):
        install_configs(tmp_path)
    for path in paths:
        scope = {}
        exec(path.read_text(), scope)
        base = tmp_path / "configs" / path.parent.name / scope["_base_"][0]
        base.parent.mkdir(parents=True, exist_ok=True)
        base.touch()
    made = install_configs(tmp_path)
    assert [path.relative_to(tmp_path / "configs") for path in made] == [path.relative_to(CONFIGS) for path in paths]
    assert all(path.is_file() for path in made)
    edited = made[0]
    edited.write_text("# mine")
    with pytest.raises(ConfigError, match=f"{edited.name} differ.*--force"):
        install_configs(tmp_path)
    assert edited.read_text() == "# mine"
    install_configs(tmp_path, force=True)
    assert edited.read_bytes() == paths[0].read_bytes()


def test_configurations_are_installed_whole_or_not_at_all(tmp_path, monkeypatch):
    sources = sorted(CONFIGS.glob("*/*.py"))
    for source in sources:
        scope: dict = {}
        exec(source.read_text(), scope)
        base = tmp_path / "configs" / source.parent.name / scope["_base_"][0]
        base.parent.mkdir(parents=True, exist_ok=True)
        base.touch()
    before = sorted(tmp_path.rglob("*"))
    copied = []

    def fill(source, target):
        target.write_bytes(source.read_bytes()[:20])
        copied.append(target)
        if len(copied) == len(sources):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fill)
        with pytest.raises(OSError, match="No space left"):
            install_configs(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    made = install_configs(tmp_path)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, *made])


def test_the_installer_imports_no_host(tmp_path) -> None:
    for host in ("pointcept", "torch_pointcloud"):
        (tmp_path / f"{host}.py").write_text(f"raise SystemExit('{host} was imported')")
    command = [sys.executable, "-m", "quest_pointcept", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is it Pointcept's checkout?" in done.stderr
