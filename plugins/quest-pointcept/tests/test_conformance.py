"""Through the suite that all adapters inherit: torch-pointcloud's models, and a stand-in for Pointcept's attention."""

from typing import ClassVar

from clouds import ENCODER, SEGMENTATION, clouds
from stand_in import Stages
from torch_pointcloud.models.point_transformer_v3 import (
    PointTransformerV3Classification,
    PointTransformerV3Encoder,
    PointTransformerV3Segmentation,
)

import quest_pointcept  # noqa: F401
from quest_core.testing import AdapterConformance
from quest_pointcept import PointceptAdapter

FAMILIES_WITHOUT_SCORES = ("linear", "cosine", "aft-simple", "aft-local")


class Conformance(AdapterConformance):
    adapter = PointceptAdapter()


class TorchPointcloud(Conformance):
    autocasts = False  # spconv has no bfloat16 on a CPU
    compiles = False  # and cannot be traced


class TestSegmentation(TorchPointcloud, sites=5, refused=("aft-conv",)):
    """torch-pointcloud's encoder and decoder."""

    attn_kind = "default"
    attn_drop = 0.0
    widths = (16, 32)

    def make_model(self):
        widths = {"encoder_channels": self.widths, "decoder_channels": self.widths[:1], "decoder_patch_size": (16,)}
        drops = {"drop_path": 0.1, "attn_drop": self.attn_drop, "proj_drop": 0.1}
        return PointTransformerV3Segmentation(**SEGMENTATION | widths | drops, attn_kind=self.attn_kind)

    def make_inputs(self):
        return clouds(45, 30, 5)


class TestSegmentationDropout(TestSegmentation, variant=True, refused=("linear", "aft-simple")):
    """Dropout on the weights: the numbers must come from the host's own stream."""

    attn_drop = 0.2


class TestSegmentationRelative(TestSegmentation, variant=True, refused=FAMILIES_WITHOUT_SCORES):
    attn_kind = "rpe"


class TestSegmentationRotary(TestSegmentation, variant=True, refused=("aft-simple", "aft-full", "aft-local")):
    attn_kind = "rope"
    widths = (24, 48)

    def make_inputs(self):
        x, grid, batch = clouds(45, 30, 5)
        return x, grid, batch, grid.float() / 4


class TestClassification(TorchPointcloud, variant=True, sites=2):
    def make_model(self):
        sizes = {"encoder_depths": (1, 1), "encoder_channels": (16, 16), "encoder_num_heads": (2, 2)}
        return PointTransformerV3Classification(**ENCODER | sizes | {"drop_path": 0.1}, num_classes=3)

    def make_inputs(self):
        return clouds(40, 30, 5)


class TestSonataEncoder(TorchPointcloud, variant=True, sites=3):
    """Grid pooling, a linear stem and layer norms: the encoder of Sonata, Concerto and Utonia."""

    def make_model(self):
        sizes = {"encoder_depths": (1, 2), "encoder_num_heads": (2, 2), "drop_path": 0.1}
        kinds = {"pooling": "grid", "stem_type": "linear", "norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
        return PointTransformerV3Encoder(**ENCODER | sizes | kinds)

    def make_inputs(self):
        return clouds(45, 30)


class TestPoint(Conformance, sites=4, refused=("aft-conv",)):
    """A stand-in for Pointcept's attention, which is called with a Point."""

    compiles = False  # layouts are made on the host, and Points are not tensors
    options: ClassVar[dict] = {}

    def make_model(self):
        return Stages(proj_drop=0.1, **self.options)

    def make_inputs(self):
        return clouds(37, 24, 19)


class TestPointSmallCloud(TestPoint, variant=True):
    """Without flash, every patch shrinks to the smallest cloud."""

    def make_inputs(self):
        return clouds(37, 12, 6)


class TestPointFlash(TestPointSmallCloud, variant=True):
    """With it, patches keep their size, and a small cloud is a short patch."""

    options: ClassVar[dict] = {"enable_flash": True}


class TestPointDropout(TestPoint, variant=True, refused=("linear", "aft-simple")):
    options: ClassVar[dict] = {"attn_drop": 0.2, "upcast_attention": True, "upcast_softmax": True}


class TestPointRelative(TestPoint, variant=True, refused=FAMILIES_WITHOUT_SCORES):
    options: ClassVar[dict] = {"enable_rpe": True}


class TestPointRotary(TestPoint, variant=True, refused=("aft-simple", "aft-full")):
    options: ClassVar[dict] = {"rotary": True, "enable_flash": True}
