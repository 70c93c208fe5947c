"""Every kind of attention that the plugin replaces, through the suite that all adapters inherit."""

import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.crossvit import CrossVit
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

from quest_core.testing import AdapterConformance
from quest_timm import TimmAdapter

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


@pytest.fixture
def explicit():
    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(True)


class Images(AdapterConformance, sites=2, refused=("aft-conv",), tolerance=1e-6):
    """Architectures of `SMALL` sizes on images [B, 3, 16, 16]."""

    adapter = TimmAdapter()
    kind: type
    options: dict[str, object]

    @pytest.mark.parametrize("training", [True, False])
    def test_standard_equals_the_host_without_fused_attention(self, explicit, training):
        self.test_standard_equals_the_host(training)

    def make_model(self):
        return self.kind(**SMALL, **self.options)

    def make_inputs(self):
        return (torch.randn(3, 3, 16, 16),)


class TestVisionTransformer(Images):
    kind, options = VisionTransformer, {"attn_drop_rate": 0.2, "proj_drop_rate": 0.1}


class TestVisionTransformerWithEverything(Images, variant=True):
    """Norms of queries and keys, layer scale, register tokens, pooled output."""

    calibrates = False  # the norm of the queries would undo it

    def make_model(self):
        return VisionTransformer(
            **SMALL, qk_norm=True, init_values=0.5, reg_tokens=2, global_pool="avg", scale_attn_norm=True
        )


ROTARY = {"use_rot_pos_emb": True, "head_init_scale": 1.0}


class TestEva(Images):
    kind, options = Eva, {**ROTARY, "attn_drop_rate": 0.2, "scale_attn_inner": True}


class TestEvaSeparate(Images, variant=True):
    refused = ("aft-simple",)  # its queries do not meet keys, where rotary positions act
    kind, options = Eva, {**ROTARY, "qkv_fused": False, "swiglu_mlp": True}


class TestRope(Images):
    kind, options = Eva, {**ROTARY, "attn_type": "rope", "rope_rotate_half": True}


class TestBeit(Images, refused=("linear",)):
    def make_model(self):
        return Beit(**SMALL, use_rel_pos_bias=True, use_abs_pos_emb=False, attn_drop_rate=0.2, head_init_scale=1.0)


class TestBeitSharedBias(Images, variant=True, refused=("linear",)):
    kind, options = Beit, {"use_shared_rel_pos_bias": True, "qkv_bias": False, "head_init_scale": 1.0}


class TestSwin(Images, refused=("linear", "elliptical-quest")):
    """The second block shifts its windows, which needs the mask."""

    def make_model(self):
        model = SwinTransformer(
            img_size=16, patch_size=2, embed_dim=16, depths=(2,), num_heads=(4,), window_size=4, num_classes=5,
            attn_drop_rate=0.2, drop_path_rate=0.0,
        )  # fmt: skip
        for layer in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
            torch.nn.init.normal_(layer.weight, std=0.2)  # timm's are too small for two steps to move every parameter
        return model


class TestCrossVit(Images, sites=5, refused=("elliptical-quest",)):
    """Two branches; each class token attends to the other branch."""

    def make_model(self):
        return CrossVit(
            img_size=16, img_scale=(1.0, 1.0), patch_size=(4, 8), num_classes=5, embed_dim=(16, 32),
            depth=((1, 2, 0),), num_heads=(4, 4), mlp_ratio=(2.0, 2.0, 1.0), attn_drop_rate=0.2,
        )  # fmt: skip
