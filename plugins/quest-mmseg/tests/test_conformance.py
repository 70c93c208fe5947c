"""The conformance suite for each kind of attention in mmseg."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from conftest import NORM, segmenter
from mmcv.cnn.bricks.transformer import MultiheadAttention as HostMultiheadAttention
from mmengine.runner.checkpoint import get_state_dict
from mmseg.registry import MODELS
from torch import nn

from quest_core import CheckpointError, inject
from quest_core.checkpoints import ENTRY
from quest_core.hosts.adapter import Adapter
from quest_core.mechanisms.elliptical import Elliptical
from quest_core.testing import AdapterConformance
from quest_mmseg.adapter import MmsegAdapter


def randomized(model):
    """Tables of position biases start at zero, and would hide a mistake."""
    for name, parameter in model.named_parameters():
        if name.endswith(("relative_position_bias_table", "cls_token", "pos_embed")):
            nn.init.normal_(parameter)
    return model


class TestSegmenter(AdapterConformance, sites=4, refused=("linear", "aft-conv(dims=1)", "aft-conv(prefix=1)")):
    adapter: ClassVar[Adapter] = MmsegAdapter()
    drops: ClassVar[dict[str, float]] = {"attn_drop_rate": 0.1, "drop_rate": 0.1}

    def make_model(self):
        config = segmenter()
        config.backbone.update(self.drops)
        config.decode_head.update(self.drops)
        return randomized(MODELS.build(config))

    def make_inputs(self):
        return (torch.randn(2, 3, 32, 48),)


class TestSegmenterWithoutDropout(TestSegmenter, variant=True, refused=("aft-conv(dims=1)", "aft-conv(prefix=1)")):
    """As the paper trains it: families are possible."""

    drops: ClassVar[dict[str, float]] = {}
    test_compiles = None  # the same layers as above; a compilation takes ten seconds


class Whole(nn.Module):
    """mmseg's backbones return None from `train`, so they are not called with `model.eval()(x)`."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return torch.cat([out.flatten(1) for out in self.backbone(x)], dim=1)


class Backbone(AdapterConformance):
    test_compiles = None  # see TestSegmenter
    adapter: ClassVar[Adapter] = MmsegAdapter()
    config: ClassVar[dict[str, Any]]

    def make_model(self):
        return randomized(Whole(MODELS.build(dict(self.config))))

    def make_inputs(self):
        return (torch.randn(2, 3, 32, 32),)


_BEIT = {
    "img_size": 32, "patch_size": 8, "embed_dims": 16, "num_layers": 2, "num_heads": 4, "out_indices": (0, 1),
    "norm_cfg": NORM, "attn_drop_rate": 0.1,
}  # fmt: skip


class TestBEiT(Backbone, sites=2, refused=("linear", "aft-simple")):
    config: ClassVar[dict[str, Any]] = {"type": "BEiT", "qv_bias": True, **_BEIT}


class TestMAE(Backbone, variant=True, sites=2, refused=("cosine", "aft-full")):
    config: ClassVar[dict[str, Any]] = {"type": "MAE", "init_values": 1.0, **_BEIT}


class TestSwin(Backbone, sites=4, refused=("linear", "elliptical-quest")):
    """Windows with and without the mask of shifted ones."""

    config: ClassVar[dict[str, Any]] = {
        "type": "SwinTransformer", "embed_dims": 16, "patch_size": 2, "window_size": 4, "depths": (2, 2),
        "num_heads": (4, 4), "strides": (2, 2), "out_indices": (0, 1), "attn_drop_rate": 0.1,
    }  # fmt: skip


class TestSegFormer(Backbone, sites=2, refused=("linear", "aft-conv")):
    """Keys from a reduced image in the first stage, from the image itself in the second."""

    config: ClassVar[dict[str, Any]] = {
        "type": "MixVisionTransformer", "embed_dims": 16, "num_stages": 2, "num_layers": (1, 1), "num_heads": (2, 4),
        "patch_sizes": (7, 3), "strides": (4, 2), "sr_ratios": (2, 1), "out_indices": (0, 1), "attn_drop_rate": 0.1,
    }  # fmt: skip


class TestPCPVT(Backbone, variant=True, sites=2, refused=("linear",)):
    """Twins with only global attention."""

    config: ClassVar[dict[str, Any]] = {
        "type": "PCPVT", "embed_dims": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2], "num_heads": [2, 4],
        "mlp_ratios": [2, 2], "out_indices": (0, 1), "depths": [1, 1], "sr_ratios": [2, 1], "attn_drop_rate": 0.1,
        "norm_after_stage": False,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [TestBEiT, TestMAE, TestSwin])
def test_backbones_that_ignore_unexpected_keys(kind, tmp_path):
    """These load `init_cfg` by PyTorch's `load_state_dict(strict=False)`: stock ones load any attention."""
    path, ours = tmp_path / "backbone.pth", f"quest_mmseg.{kind.config['type']}"
    trained = MODELS.build({**kind.config, "type": ours, "attention": "quest"})
    torch.save(get_state_dict(trained), path)  # mmengine's, which saves checkpoints
    start = {**kind.config, "init_cfg": {"type": "Pretrained", "checkpoint": str(path)}}
    stock = MODELS.build(start)
    stock.init_weights()
    expected = {name: value for name, value in trained.state_dict().items() if ENTRY not in name}
    torch.testing.assert_close(stock.state_dict(), expected)
    with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has 'standard'"):
        MODELS.build({**start, "type": ours, "attention": "standard"}).init_weights()
    loaded = MODELS.build({**start, "type": ours, "attention": "quest"})
    loaded.init_weights()
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict())


@pytest.mark.parametrize("kind", [TestMAE, TestSwin])
def test_packed_projections_are_called(kind):
    """LoRA and quantization put another module in place of `qkv`, and hooks watch its calls."""
    model = MODELS.build({**kind.config, "type": f"quest_mmseg.{kind.config['type']}", "attention": "quest"})
    called = []
    for path, module in model.named_modules():
        if path.endswith("qkv"):
            module.register_forward_hook(lambda *_, path=path: called.append(path))
    model(torch.randn(1, 3, 32, 32))
    assert len(called) == kind.sites


@pytest.mark.parametrize("positions", [(5, 3, 16), (5, 1, 16)])
@pytest.mark.parametrize("named", [("query_pos",), ("query_pos", "key_pos")])
def test_positions_are_added_to_the_keys_where_mmcv_adds_them(positions, named):
    host, x = HostMultiheadAttention(16, 4).double(), torch.randn(5, 3, 16, dtype=torch.float64)
    given = dict.fromkeys(named, torch.randn(positions, dtype=torch.float64))
    ours, _ = inject(copy.deepcopy(host), "standard", adapter=MmsegAdapter())
    torch.testing.assert_close(ours(x, **given), host(x, **given))


@pytest.mark.parametrize("attention", ["quest", "sigmoid", "sinkhorn"])
def test_what_swin_masks_is_hidden_completely(attention):
    """Swin adds −100 to the logits of shifted windows, which would be visible to other normalizers than softmax."""
    config = {**TestSwin.config, "type": "quest_mmseg.SwinTransformer", "attention": attention, "attn_drop_rate": 0.0}
    layer = MODELS.build(config).stages[0].blocks[1].attn.w_msa.eval()
    seen = []
    layer.mechanism.score.register_forward_hook(lambda *call: seen.append(call[2]["mask"]), with_kwargs=True)
    x = torch.randn(3, 16, 16)
    part = torch.arange(16) < 10
    mask = torch.where(part == part[:, None], 0.0, -100.0)[None]  # [W, N, N]
    other = torch.cat([x[:, :10], torch.randn(3, 6, 16)], dim=1)
    assert torch.equal(layer(x, mask)[:, :10], layer(other, mask)[:, :10])
    assert (seen[0][..., :10, 10:] == -torch.inf).all()


@pytest.mark.parametrize("attention", ["elliptical", "elliptical-quest+mqa"])
def test_no_stage_follows_another(attention):
    """MiT's stages differ in width and reduction, but with mqa not in the shape of their values."""
    model = MODELS.build({**TestSegFormer.config, "type": "quest_mmseg.MixVisionTransformer", "attention": attention,
                          "num_layers": (2, 2)})  # fmt: skip
    scores = [module for module in model.modules() if isinstance(module, Elliptical)]
    assert [score._previous[0] for score in scores] == [None, scores[0], None, scores[2]]
    for out in model(torch.randn(2, 3, 32, 32)):
        assert out.isfinite().all()
