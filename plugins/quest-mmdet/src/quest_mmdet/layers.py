"""The attention of mmdet itself with another mechanism inside; that of mmcv is in `quest_mmengine.layers`."""

from typing import Any

from mmdet.models.backbones.pvt import SpatialReductionAttention as HostSpatialReductionAttention
from mmdet.models.backbones.swin import WindowMSA as HostWindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention as HostConditionalAttention
from torch import Tensor

from quest_core.config import AttentionConfig
from quest_core.drafts import draft
from quest_core.hosts.adapter import Capabilities, HostAttention, mechanism_for
from quest_core.mechanism import head_sizes
from quest_core.ops import mask_of_host
from quest_core.projections import Separate
from quest_mmengine.layers import WindowAttention, Wrapping


class WindowMSA(WindowAttention, HostWindowMSA):  # type: ignore[misc]
    """For Swin's attention inside windows."""


class SpatialReductionAttention(Wrapping, HostSpatialReductionAttention):  # type: ignore[misc]
    """For the attention of PVT, whose keys may come from a reduced image."""


class ConditionalAttention(HostAttention, HostConditionalAttention):  # type: ignore[misc]
    """For the attention of Conditional DETR and DAB-DETR, which projects contents and positions apart."""

    projections = Separate(v="v_proj")
    drops_weights = True

    @classmethod
    def asks(cls, host: Any, path: str, model: Any) -> Capabilities:
        """Queries and keys are sums or rows of several projections, so these keep their shape."""
        return Capabilities(ordered=False, cross=host.cross_attn, regroups=False, dropout=host.attn_drop.p > 0)

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads. In cross-attention a query or key holds contents and positions, [2·D]."""
        d = host.embed_dims // host.num_heads
        return {"num_heads": host.num_heads, "head_dim": d * (1 + host.cross_attn), "value_dim": d}

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Refuse initial norms, of which each projection would be a part."""
        return "its queries are made of several projections; leave init out" if config.initial_norms else None

    @classmethod
    def adopt(cls, host: Any, config: AttentionConfig, *, fresh: bool = False, **sizes: Any) -> Any:
        """Return the draft of a replacement; see `HostAttention.adopt`. No projection becomes smaller."""
        made = draft(host, cls)
        made.config, made.head_sizes = config, head_sizes(config, **sizes)
        made.mechanism = mechanism_for(made, config, made.head_sizes, None, projections=cls.projections)
        return made

    def forward_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend as mmdet's, and return no weights, which it never reads.

        Args:
            query: [B, N, H·D].
            key, value: [B, M, H·D] and [B, M, E].
            attn_mask: [N, M] or [B·H, N, M], boolean or bytes (True = may not attend), or additive.
            key_padding_mask: [B, M], True = padding.
        """
        if attn_mask is not None:
            attn_mask = attn_mask if attn_mask.is_floating_point() else attn_mask.bool()  # mmdet takes bytes too
            attn_mask = attn_mask.unflatten(0, (len(query), self.num_heads)) if attn_mask.dim() == 3 else attn_mask
        real = None
        if key_padding_mask is not None:
            real = self.mechanism.padding_mask(~key_padding_mask.bool(), same_tokens=not self.cross_attn)
        out = self.attend(*self.split(query, key, value), mask_of_host(attn_mask, real))
        return self.out_proj(out), None
