"""Segmenters on backbones of timm, by quest-timm, and of mmpretrain are replaced whole."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import segmenter
from mmseg.registry import MODELS

import quest_core
import quest_mmseg
from quest_core.hosts import plugins

sys.path.append(str(Path(__file__).parents[2] / "quest-suites" / "environment"))
import mmpretrain.models  # registers its backbones
import quest_suites_environment  # noqa: F401  # there already where ./dev made the environment

BACKBONES: dict[str, dict[str, Any]] = {
    "timm": {
        "type": "TIMMBackbone", "model_name": "vit_tiny_patch16_224", "features_only": True, "pretrained": False,
        "img_size": (32, 48), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "out_indices": (1,),
        "attn_drop_rate": 0.1,
    },
    "mmpretrain": {
        "type": "mmpretrain.VisionTransformer", "img_size": (32, 48), "patch_size": 8, "out_type": "featmap",
        "arch": {"embed_dims": 16, "num_layers": 2, "num_heads": 4, "feedforward_channels": 32}, "out_indices": (1,),
        "drop_path_rate": 0.1, "layer_cfgs": {"layer_scale_init_value": 0.5},
    },
}  # fmt: skip


def build(kind, attention=None, **options):
    torch.manual_seed(0)
    options |= {} if attention is None else {"attention": attention}
    config = segmenter(backbone=BACKBONES[kind], **options)
    config.decode_head.in_index = 0
    return MODELS.build(config)


@pytest.mark.parametrize("kind", BACKBONES)
def test_backbone_and_head_are_replaced(kind):
    report = build(kind, "quest").attention_report
    assert sorted(row.path.partition(".")[0] for row in report.replacements) == ["backbone"] * 2 + ["decode_head"] * 2
    assert {row.adapter for row in report.replacements} == ({"mmseg", "timm"} if kind == "timm" else {"mmseg"})
    assert not report.left_alone


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", BACKBONES)
def test_standard_equals_the_host(kind, training):
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    found = []
    for attention in (None, "standard"):
        model = build(kind, attention).double()
        model.train(training)  # returns None
        torch.manual_seed(1)
        out = model(images)
        out.square().sum().backward()
        found.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_standard_keeps_the_scale_of_mmpretrain():
    """T2T-ViT gives a qk_scale; mmpretrain 1.2 then divides q·k by head_dims ** -0.5."""
    host = mmpretrain.models.utils.MultiheadAttention(16, 4, qk_scale=0.5).double()
    ours, _ = quest_core.inject(copy.deepcopy(host), "standard", adapter=quest_mmseg.MmsegAdapter())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), host(x))


@pytest.mark.parametrize("kind", BACKBONES)
def test_fewer_key_heads_and_copies(kind):
    model = build(kind, "quest+gqa(kv_heads=2)").eval()
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(copy.deepcopy(model)(images), model(images))
    stock = build(kind)
    with pytest.warns(quest_core.AttentionMismatchWarning) as warned:
        model.load_state_dict(stock.state_dict())
    assert len(warned) == 1
    quest_core.inject(stock, "quest+gqa(kv_heads=2)", adapter=[quest_mmseg.MmsegAdapter(), "timm"])
    torch.testing.assert_close(model(images), stock.eval()(images))


def test_trained_weights_of_timm_are_pooled_and_not_scaled(monkeypatch):
    from mmseg.models.backbones import TIMMBackbone

    stock = TIMMBackbone.__init__

    def trained(self, *arguments, **options):  # as `pretrained=True`, which would download
        stock(self, *arguments, **options)
        self._is_init = True

    monkeypatch.setattr(TIMMBackbone, "__init__", trained)
    path = "backbone.timm_model.model.blocks.0.attn.qkv.weight"
    rows = build("timm").get_parameter(path)[16:32]
    found = build("timm", "quest+gqa(kv_heads=2)").get_parameter(path)[16:24]
    torch.testing.assert_close(found, rows.view(2, 2, 4, 16).mean(1).flatten(0, 1))
    with pytest.raises(quest_core.ConfigError, match="this model may be trained"):
        build("timm", "quest(init=5)")


def test_without_quest_timm_the_error_names_it(monkeypatch):
    found = [plugin for plugin in plugins.plugins() if plugin.name != "timm"]
    monkeypatch.setattr(plugins, "plugins", lambda: found)
    with pytest.raises(quest_core.InjectionError, match=r"leave 2 as they are.*pip install 'quest-timm\[host\]'"):
        build("timm", "quest")
    assert len(build("timm", "quest", allow_partial=True).attention_report.left_alone) == 2
