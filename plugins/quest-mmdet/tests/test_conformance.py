"""The conformance suite for each kind of attention in mmdet."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from conftest import DAB, DETR, samples, small
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.registry import MODELS
from torch import Tensor, nn

from quest_core import inject
from quest_core.hosts.adapter import Adapter
from quest_core.testing import AdapterConformance
from quest_mmdet.adapter import MmdetAdapter


class Detector(nn.Module):
    """A detector as a function of images."""

    def __init__(self, config):
        super().__init__()
        self.model = MODELS.build(config)
        self.model.positional_encoding.register_forward_hook(self.in_type)

    def in_type(self, module, inputs, made):
        """mmdet's positions are float32 in a model of any type."""
        return made.to(next(self.model.parameters()).dtype)

    def forward(self, x):
        made = self.model(x, samples(len(x), x.shape[-1]), mode="tensor")
        return torch.cat([one.flatten(1) for one in made if isinstance(one, Tensor)], dim=1)


class OfDetector(AdapterConformance):
    adapter: ClassVar[Adapter] = MmdetAdapter()
    compiles = False  # mmdet reads the sizes of images from the samples
    mechanisms = ("quest", "qknorm-hs", "quest+sigmoid", "sinkhorn")

    def make_inputs(self):
        return (torch.randn(2, 3, 32, 32),)


class TestDetr(OfDetector, sites=6, refused=("linear", "aft-full", "aft-conv")):
    """mmcv's attention in encoder and decoder."""

    def make_model(self):
        return Detector(small(DETR))


class TestDabDetr(OfDetector, sites=6, refused=("gqa(kv_heads=2)", "quest(init=5)", "aft-simple"), calibrates=False):
    """Queries and keys of contents and positions, in cross-attention side by side."""

    test_a_host_checkpoint_loads_into_fewer_key_heads = None

    def make_model(self):
        config = small(DAB)
        for part in (config.decoder.layer_cfg.self_attn_cfg, config.decoder.layer_cfg.cross_attn_cfg):
            part.attn_drop = 0.1
        return Detector(config)


class Whole(nn.Module):
    """Swin's `train` returns None, so it is not called with `model.eval()(x)`."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return torch.cat([out.flatten(1) for out in self.backbone(x)], dim=1)


class Backbone(AdapterConformance):
    adapter: ClassVar[Adapter] = MmdetAdapter()
    compiles = False  # the classes are those of quest-mmseg's tests
    config: ClassVar[dict[str, Any]]

    def make_model(self):
        model = MODELS.build(dict(self.config))
        for name, parameter in model.named_parameters():
            if name.endswith(("relative_position_bias_table", "pos_embed")):
                nn.init.normal_(parameter)  # zeros would hide a mistake
        return Whole(model)

    def make_inputs(self):
        return (torch.randn(2, 3, 32, 32),)


class TestSwin(Backbone, sites=4, refused=("linear", "elliptical-quest")):
    config: ClassVar[dict[str, Any]] = {
        "type": "SwinTransformer", "embed_dims": 16, "patch_size": 2, "window_size": 4, "depths": (2, 2),
        "num_heads": (4, 4), "strides": (2, 2), "out_indices": (0, 1), "attn_drop_rate": 0.1,
    }  # fmt: skip


class TestPvt(Backbone, sites=2, refused=("linear", "aft-conv")):
    """Keys from a reduced image in the first stage, from the image itself in the second."""

    config: ClassVar[dict[str, Any]] = {
        "type": "PyramidVisionTransformer", "pretrain_img_size": 32, "embed_dims": 16, "num_stages": 2,
        "num_layers": (1, 1), "num_heads": (2, 4), "patch_sizes": (4, 2), "strides": (4, 2), "paddings": (0, 0),
        "sr_ratios": (2, 1), "mlp_ratios": (2, 2), "out_indices": (0, 1), "attn_drop_rate": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float64, None])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_conditional_attention(cross, kind, per_head, padded):
    batch, n, heads, width = 3, 5, 4, 16
    m = 7 if cross else n
    host = ConditionalAttention(width, heads, cross_attn=cross).double()
    x, positions = torch.randn(2, batch, n, width, dtype=torch.float64)
    memory = torch.randn(batch, m, width, dtype=torch.float64) if cross else x
    given = {"query_pos": positions, "ref_sine_embed": positions, "key_pos": torch.randn_like(memory)}
    if kind is not None:
        hidden = torch.rand(*((batch * heads,) if per_head else ()), n, m) < 0.4
        hidden[..., 0] = False  # mmdet's own output of a query that sees nothing is NaN
        given["attn_mask"] = torch.randn(hidden.shape, dtype=kind) if kind.is_floating_point else hidden.to(kind)
    if padded:
        given["key_padding_mask"] = torch.arange(m) >= torch.tensor([m, m - 1, m - 2])[:, None]
    ours, _ = inject(copy.deepcopy(host), "standard", adapter=MmdetAdapter())
    torch.testing.assert_close(ours(x, memory, **copy.deepcopy(given)), host(x, memory, **given))
