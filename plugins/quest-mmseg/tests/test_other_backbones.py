"""Backbones of other libraries: timm's under a head of mmseg, by quest-timm, and mmpretrain's."""

import copy
from typing import Any, ClassVar

import mmpretrain.models  # registers its backbones
import pytest
import torch
from conftest import segmenter
from mmseg.models.backbones import TIMMBackbone
from mmseg.registry import MODELS
from test_conformance import Backbone

import quest_core
import quest_mmseg
from quest_core.hosts import plugins


class TestMmpretrain(Backbone, sites=2, refused=("aft-conv",)):
    config: ClassVar[dict[str, Any]] = {
        "type": "mmpretrain.VisionTransformer", "img_size": 32, "patch_size": 8, "out_type": "featmap",
        "arch": {"embed_dims": 16, "num_layers": 2, "num_heads": 4, "feedforward_channels": 32}, "out_indices": (0, 1),
        "drop_path_rate": 0.1, "layer_cfgs": {"layer_scale_init_value": 0.5},
    }  # fmt: skip


def test_standard_keeps_the_scale_of_mmpretrain():
    """T2T-ViT gives a qk_scale; mmpretrain 1.2 then divides q·k by head_dims ** -0.5."""
    host = mmpretrain.models.utils.MultiheadAttention(16, 4, qk_scale=0.5).double()
    ours, _ = quest_core.inject(copy.deepcopy(host), "standard", adapter=quest_mmseg.MmsegAdapter())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), host(x))


def on_timm(**options):
    torch.manual_seed(0)
    backbone = {
        "type": "TIMMBackbone", "model_name": "vit_tiny_patch16_224", "features_only": True, "pretrained": False,
        "img_size": (32, 48), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "out_indices": (1,),
    }  # fmt: skip
    config = segmenter(backbone=backbone, **options)
    config.decode_head.in_index = 0
    return MODELS.build(config)


def test_backbone_and_head_are_replaced():
    model = on_timm(attention="quest")
    rows = model.attention_report.replacements
    found = [(row.path.partition(".")[0], row.adapter) for row in rows]
    assert sorted(found) == [("backbone", "timm")] * 2 + [("decode_head", "mmseg")] * 2
    assert not model.attention_report.left_alone
    assert model(torch.randn(2, 3, 32, 48)).isfinite().all()


def test_trained_weights_of_timm_are_pooled_and_not_scaled(monkeypatch):
    stock = TIMMBackbone.__init__

    def trained(self, *arguments, **options):  # as `pretrained=True`, which would download
        stock(self, *arguments, **options)
        self._is_init = True

    monkeypatch.setattr(TIMMBackbone, "__init__", trained)
    path = "backbone.timm_model.model.blocks.0.attn.qkv.weight"
    rows = on_timm().get_parameter(path)[16:32]
    found = on_timm(attention="quest+gqa(kv_heads=2)").get_parameter(path)[16:24]
    torch.testing.assert_close(found, rows.view(2, 2, 4, 16).mean(1).flatten(0, 1))
    with pytest.raises(quest_core.ConfigError, match="this model may be trained"):
        on_timm(attention="quest(init=5)")


def test_without_quest_timm_the_error_names_it(monkeypatch):
    """Only the head's attention would be replaced."""
    found = [plugin for plugin in plugins.plugins() if plugin.name != "timm"]
    monkeypatch.setattr(plugins, "plugins", lambda: found)
    with pytest.raises(quest_core.InjectionError, match=r"leave 2 as they are.*pip install 'quest-timm\[host\]'"):
        on_timm(attention="quest")
    report = on_timm(attention="quest", allow_partial=True).attention_report
    assert (len(report.replacements), len(report.left_alone)) == (2, 2)
