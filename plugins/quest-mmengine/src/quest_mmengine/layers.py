"""The attention that mmsegmentation and mmdetection share: mmcv's, and that of Swin."""

import math
from typing import Any, ClassVar

from mmcv.cnn.bricks.transformer import MultiheadAttention as HostMultiheadAttention
from torch import Tensor

from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.hosts.adapter import Capabilities, HostAttention, refuses_chained, window_bias
from quest_core.hosts.torch import TorchAttention
from quest_core.projections import Packed, Projections


class Attention(TorchAttention):
    """The drop-in as mmcv calls it: without `need_weights`, though it never reads the weights.

    Attributes:
        class_tokens: tokens off the grid at the end of the sequence, as in Segmenter's head, if the family has a grid.
        hidden: the number that hides in additive masks of the host, besides −inf.
    """

    class_tokens: int = 0
    hidden: float = -math.inf

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
        if attn_mask is not None and self.hidden > -math.inf:
            attn_mask = attn_mask.masked_fill(attn_mask == self.hidden, -math.inf)
        out, _ = super().forward(query, key, value, key_padding_mask, need_weights=False, attn_mask=attn_mask)
        return out.roll(-self.class_tokens, axis) if self.class_tokens else out, None


class Wrapping:
    """Base of the modules that hold torch.nn.MultiheadAttention as `attn`, which is what has the mechanism."""

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads."""
        return {"num_heads": host.num_heads, "head_dim": host.embed_dims // host.num_heads}

    @classmethod
    def asks(cls, host: Any, path: str, model: Any) -> Capabilities:
        """Object queries and patches of images of any size have no order that biases could follow."""
        decoder = path.endswith("cross_attn")  # in which Mask2Former and its like hide other keys from each query
        cross = decoder or getattr(host, "sr_ratio", 1) > 1
        return Capabilities(ordered=False, cross=cross, pairs=decoder, dropout=host.attn.dropout > 0)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Return None, because the capabilities say all."""
        return None

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


class PackedAttention(HostAttention):
    """Base for Swin, BEiT and MAE: one `qkv` projection and a learned bias by relative position."""

    projections: ClassVar[Projections] = Packed("qkv")
    capabilities = Capabilities(pairs=True)
    hides_by_infinity = True
    drops_weights = True

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads and the factor on q·k."""
        return Wrapping.sizes(host) | {"standard_scale": host.scale}

    def _attend(self, packed: Tensor, mask: Tensor) -> Tensor:
        """Queries, keys and values [B, N, (H + 2·G)·D], additive mask [1 or B, H, N, N] -> [B, N, E]."""
        out = self.attend(*self.split_packed(packed), mask)
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]

    def _position_bias(self, tokens: int) -> Tensor:
        """[1, H, N, N]."""
        table = self.relative_position_bias_table[self.relative_position_index.flatten()]  # type: ignore[index]
        return table.view(tokens, tokens, -1).permute(2, 0, 1).contiguous().unsqueeze(0)  # type: ignore[no-any-return]


class WindowAttention(PackedAttention):
    """For Swin's attention inside windows, of which each host has a class of its own."""

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Refuse what compares layers, because every second one shifts its windows."""
        return refuses_chained(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Windows [B·W, N, E] and a mask [W, N, N], 0 or Swin's −100, which hides -> [B·W, N, E]."""
        return self._attend(self.qkv(x), window_bias(self._position_bias(x.shape[1]), mask, len(x)))
