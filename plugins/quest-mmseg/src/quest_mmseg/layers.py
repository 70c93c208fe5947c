"""mmseg's attention modules with another mechanism inside.

Each class is a subclass of the host's, takes its call and holds its sub-modules under their own names, so a state dict
of the host loads strictly, unless the mechanism has parameters of its own. With fewer key/value heads (gqa, mqa) the
key and value projections are smaller, and a host checkpoint is pooled on load.

mmcv asks torch.nn.MultiheadAttention for weights that it does not read. These modules form none, so `standard` reaches
the fused kernel too.
"""

from collections.abc import Iterator
from typing import Any

import torch
from mmseg.models.backbones.beit import BEiTAttention as HostBEiTAttention
from mmseg.models.backbones.mae import MAEAttention as HostMAEAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention as HostEfficientMultiheadAttention
from mmseg.models.backbones.swin import WindowMSA as HostWindowMSA
from torch import Tensor, nn

from quest_core.errors import InputError
from quest_core.hosts.adapter import HostAttention
from quest_core.mechanism import Mechanism
from quest_core.projections import Packed, Separate
from quest_mmengine.layers import PackedAttention, WindowAttention, Wrapping


def mechanisms_with_places(module: nn.Module) -> Iterator[Mechanism]:
    """Yield the mechanisms in `module` with biases for places: on a grid (aft-conv), or by number (aft-full)."""
    for found in module.modules():
        if isinstance(found, Mechanism) and (found.on_grid or (found.family is not None and "order" in found.reads)):
            yield found


def lay_out(module: nn.Module, grid: tuple[int, int], trained: tuple[int, int] | None) -> None:
    """Tell the mechanisms in `module` the grid of patches.

    Args:
        grid: height and width in patches.
        trained: of the images that `img_size` names, to which biases by the number of a token belong.

    Raises:
        InputError: such biases would be those of other patches.
    """
    for found in mechanisms_with_places(module):
        if found.on_grid:
            found.family.grid = grid  # type: ignore[union-attr,assignment]
        elif grid != trained:
            raise InputError(
                f"the biases of '{found.config}' belong to a grid of {trained} patches, which follows from "
                f"backbone.img_size, and this image has {grid}; set img_size to the size of the crops, test with "
                "test_cfg=dict(mode='slide', ...), or use aft-conv"
            )


class EfficientMultiheadAttention(Wrapping, HostEfficientMultiheadAttention):  # type: ignore[misc]
    """For the attention of SegFormer's MiT and of PCPVT, whose keys may come from a reduced image."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """[B, N, E] with N = height · width -> [B, N, E]."""
        grid = (int(hw_shape[0]), int(hw_shape[1]))
        lay_out(self, grid, grid)
        out: Tensor = super().forward(x, hw_shape, identity)
        return out


class BEiTAttention(PackedAttention, HostBEiTAttention):  # type: ignore[misc]
    """For BEiT's attention, whose queries and values may have biases outside of `qkv`."""

    projections = Packed("qkv") + Separate(q="q_bias", v="v_bias")

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1 + height · width, E] -> the same."""
        if self.bias == "qv_bias":
            keys = self.v_bias.new_zeros(len(self.v_bias))
            packed = nn.functional.linear(x, self.qkv.weight, torch.cat([self.q_bias, keys, self.v_bias]))
        else:
            packed = self.qkv(x)  # called as the host does, because it may be LoRA's
        tokens = self.window_size[0] * self.window_size[1] + 1
        return self._attend(packed, self._position_bias(tokens))


class MAEAttention(BEiTAttention, HostMAEAttention):
    """For MAE's attention, which differs only in its initialization."""


class WindowMSA(WindowAttention, HostWindowMSA):  # type: ignore[misc]
    """For Swin's attention inside windows."""


class PretrainAttention(HostAttention):
    """For the attention of mmpretrain's VisionTransformer and others, used as backbones."""

    projections = Packed("qkv")

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads and the factor on q·k."""
        # With `qk_scale` (T2T-ViT) mmpretrain binds a `scale` to a function that divides by it, whatever its name says.
        divisor = getattr(host.scaled_dot_product_attention, "keywords", {}).get("scale", host.head_dims**0.5)
        return {"num_heads": host.num_heads, "head_dim": host.head_dims, "standard_scale": 1 / divisor}

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        q, k, v = self.split_packed(self.qkv(x))  # [B, H or G, N, D]
        made: Tensor = self.out_drop(self.gamma1(self.proj_drop(self.proj(self.attend(q, k, v)))))
        return v.squeeze(1) + made if self.v_shortcut else made
