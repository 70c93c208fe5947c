"""mmseg's attention modules with another mechanism inside.

Each class is a subclass of the host's, takes its call and holds its sub-modules under their own names, so a state dict
of the host loads strictly, unless the mechanism has parameters of its own. With fewer key/value heads (gqa, mqa) the
key and value projections are smaller, and a host checkpoint is pooled on load.

mmcv asks torch.nn.MultiheadAttention for weights that it does not read. These modules form none, so `standard` reaches
the fused kernel too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention as HostMultiheadAttention
from mmseg.models.backbones.beit import BEiTAttention as HostBEiTAttention
from mmseg.models.backbones.mae import MAEAttention as HostMAEAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention as HostEfficientMultiheadAttention
from mmseg.models.backbones.swin import WindowMSA as HostWindowMSA
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.errors import InputError
from quest_core.hosts.adapter import HostAttention, window_bias
from quest_core.hosts.torch import TorchAttention
from quest_core.mechanism import Mechanism
from quest_core.projections import Packed, Projections, Separate


def placed(module: nn.Module) -> Iterator[Mechanism]:
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
    for found in placed(module):
        if found.on_grid:
            found.family.grid = grid  # type: ignore[union-attr,assignment]
        elif grid != trained:
            raise InputError(
                f"the biases of '{found.config}' belong to a grid of {trained} patches, which follows from "
                f"backbone.img_size, and this image has {grid}; set img_size to the size of the crops, test with "
                "test_cfg=dict(mode='slide', ...), or use aft-conv"
            )


class Attention(TorchAttention):
    """The drop-in as mmcv calls it: without `need_weights`, though it never reads the weights.

    Attributes:
        class_tokens: tokens off the grid at the end of the sequence, as in Segmenter's head, if the family has a grid.
    """

    class_tokens: int = 0

    def forward(  # type: ignore[override]  # mmcv gives no other arguments
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend as `quest_core.MultiheadAttention.forward`, and return no weights."""
        axis = 1 if self.batch_first else 0
        if self.class_tokens:  # a family on a grid requires the tokens off it first
            query = key = value = query.roll(self.class_tokens, axis)
        out, _ = super().forward(query, key, value, key_padding_mask, need_weights=False, attn_mask=attn_mask)
        return out.roll(-self.class_tokens, axis) if self.class_tokens else out, None


class Wrapping:
    """Base of the modules that hold torch.nn.MultiheadAttention as `attn`, which is what has the mechanism."""

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads."""
        return {"num_heads": host.num_heads, "head_dim": host.embed_dims // host.num_heads}

    @classmethod
    def adopt(cls, host: Any, config: AttentionConfig, **sizes: Any) -> Any:
        """Return the draft of a replacement; see `HostAttention.adopt`."""
        made = draft(host, cls)
        made.attn = Attention.adopt(host.attn, config, **sizes)
        # mmcv swaps tokens and batch around its `attn`, which hides from it that queries and keys are one tensor.
        made.attn.batch_first, made.batch_first = made.batch_first or made.attn.batch_first, False
        return made


class MultiheadAttention(Wrapping, HostMultiheadAttention):  # type: ignore[misc]
    """For mmcv's MultiheadAttention, of which ViT, Segmenter's head, K-Net and mmdetection's decoders are made."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """identity + attention(query + query_pos, key + key_pos, value), by mmcv's own forward.

        In self-attention, `query` and `key` stay one tensor if both have the same position added.

        Args:
            query: [B, N, E], or [N, B, E] without `batch_first`.
            key, value: [B, M, E] or [M, B, E]; the query and the key by default.
            options: `attn_mask` ([N, M] or [B·H, N, M], True = may not attend, or additive), `key_padding_mask`
                ([B, M], True = padding), and what mmcv's transformer layers pass to every attention.
        """
        if (
            query_pos is not None
            and (key is None or key is query)
            and (key_pos is query_pos or (key_pos is None and query_pos.shape == query.shape))  # else mmcv adds none
        ):
            value = query if value is None else value
            identity = query if identity is None else identity
            query, key, query_pos, key_pos = query + query_pos, None, None, None
        out: Tensor = super().forward(query, key, value, identity, query_pos, key_pos, **options)
        return out


class EfficientMultiheadAttention(Wrapping, HostEfficientMultiheadAttention):  # type: ignore[misc]
    """For the attention of SegFormer's MiT and of PCPVT, whose keys may come from a reduced image."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """[B, N, E] with N = height · width -> [B, N, E]."""
        grid = (int(hw_shape[0]), int(hw_shape[1]))
        lay_out(self, grid, grid)
        out: Tensor = super().forward(x, hw_shape, identity)
        return out


class PackedAttention(HostAttention):
    """Base for BEiT, MAE and Swin: one `qkv` projection and a learned bias by relative position."""

    projections: ClassVar[Projections] = Packed("qkv")

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads and the factor on q·k."""
        return Wrapping.sizes(host) | {"standard_scale": host.scale}

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Refuse families, which have no scores for the position bias."""
        if config.family is not None:
            return f"its learned bias by relative position is added to the scores, and '{config}' has none"
        return None

    def _attend(self, packed: Tensor, mask: Tensor) -> Tensor:
        """Queries, keys and values [B, N, (H + 2·G)·D], additive mask [1 or B, H, N, N] -> [B, N, E]."""
        out = self.attend(*self.split_packed(packed), mask, seeded=True)
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]

    def _position_bias(self, tokens: int) -> Tensor:
        """[1, H, N, N]."""
        table = self.relative_position_bias_table[self.relative_position_index.flatten()]  # type: ignore[index]
        return table.view(tokens, tokens, -1).permute(2, 0, 1).contiguous().unsqueeze(0)  # type: ignore[no-any-return]


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


class WindowMSA(PackedAttention, HostWindowMSA):  # type: ignore[misc]
    """For Swin's attention inside windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Windows [B·W, N, E] and a mask [W, N, N], 0 or Swin's −100, which hides -> [B·W, N, E]."""
        return self._attend(self.qkv(x), window_bias(self._position_bias(x.shape[1]), mask, len(x)))


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
