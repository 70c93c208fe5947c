"""timm's attention modules with another mechanism inside.

Each class inherits one of timm's, so names, parameters, `set_window_size` and initialization stay those of the host.
Only the forward is another: there is one path, whether `fused_attn` is on or off. With fewer key/value heads (gqa, mqa)
the projections are smaller, and a host checkpoint is pooled on load.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.layers import attention as timm_attention
from timm.models import beit, cait, crossvit, eva, swin_transformer
from torch import Tensor, nn

from quest_core.hosts.replacement import HostAttention
from quest_core.projections import Packed, Separate


class Replacement(HostAttention):
    """Attention of timm around a mechanism. A subclass inherits a host class too, and overrides `forward`."""

    host: ClassVar[type[nn.Module]]
    cross: ClassVar[bool] = False
    biased: ClassVar[bool] = False
    """Whether the forward makes all masks itself, and they hide by −inf only."""
    rotary: ClassVar[bool] = False
    """Whether the model may turn queries and keys by their positions."""
    stacked: ClassVar[bool] = False
    """Whether each layer sees the tokens of the one before in the same order, which elliptical scores need."""

    def bias(self) -> Tensor | None:
        """Return the bias of `qkv` where the host keeps those of queries and values apart, with zeros for the keys."""
        if getattr(self, "q_bias", None) is None:
            return None
        return torch.cat([self.q_bias, self.q_bias.new_zeros(self.head_sizes.widths[1]), self.v_bias])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, N, D] and k, v [B, G, N, D] of x [B, N, E]."""
        if self.qkv is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            bias = self.bias()
            if bias is None:
                packed = self.qkv(x)
            elif self.qkv_bias_separate:
                packed = self.qkv(x) + bias
            else:
                packed = F.linear(x, self.qkv.weight, bias)
            q, k, v = packed.split(self.head_sizes.widths, -1)
        return self.by_heads(q, k, v)

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, N, H·D] as [B, H, N, D], and k and v [B, M, G·D] as [B, G, M, D]; views."""
        heads = (self.head_sizes.num_heads, self.kv_heads, self.kv_heads)
        q, k, v = [x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True)]
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the heads' outputs side by side, [B, N, H·D].

        Args:
            q: [B, H, N, D], k and v: [B, G, M, D].
            mask: boolean (True = may attend) or additive, broadcastable to [B, H, N, M].
        """
        dropout_p = self.attn_drop.p if self.training else 0.0
        out: Tensor = self.mechanism(q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=dropout_p)
        return out.transpose(1, 2).flatten(2)


class Attention(Replacement, timm_attention.Attention):
    """Replace the attention of ViT, DeiT, DeiT-3 and everything else that is built from timm.layers.Attention."""

    host = timm_attention.Attention
    projections = Packed("qkv")
    stacked = True

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the output [B, N, E] of x [B, N, E]; attn_mask as in scaled_dot_product_attention."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.project(x)
        out = self.norm(self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal))
        return self.proj_drop(self.proj(out if gate is None else out * gate))


class AttentionRope(Replacement, timm_attention.AttentionRope):
    """Replace the attention with rotary embeddings of EVA, ViT-RoPE, DINOv3 and others."""

    host = timm_attention.AttentionRope
    projections = Packed("qkv") + Separate("q_proj", "k_proj", "v_proj")
    rotary = stacked = True

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the output [B, N, E] of x [B, N, E]; rope is that of all tokens but the first `num_prefix_tokens`."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotate(q, rope).type_as(v), self.rotate(k, rope).type_as(v)
        out = self.norm(self.attend(q, k, v, attn_mask, is_causal))
        return self.proj_drop(self.proj(out if gate is None else out * gate))

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Rotate all tokens of x [B, H, N, D] but the prefix."""
        prefix = self.num_prefix_tokens
        half = getattr(self, "rotate_half", False)
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], dim=2)


class EvaAttention(AttentionRope, eva.EvaAttention):
    """Replace the attention of EVA whose keys have no bias."""

    host = eva.EvaAttention
    projections = Packed("qkv") + Separate("q_proj", "k_proj", "v_proj") + Separate(q="q_bias", v="v_bias")


class BeitAttention(Replacement, beit.Attention):
    """Replace the attention of BEiT, with relative position biases of its own, shared ones, or none."""

    host = beit.Attention
    projections = Packed("qkv") + Separate(q="q_bias", v="v_bias")
    stacked = True
    biased = True

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Return the output [B, N, E] of x [B, N, E]; the biases, the shared one [H, N, N], are added to the logits."""
        added = shared_rel_pos_bias if shared_rel_pos_bias is None else shared_rel_pos_bias[None]
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            added = own if added is None else own + added
        return self.proj_drop(self.proj(self.attend(*self.project(x), added)))


class WindowAttention(Replacement, swin_transformer.WindowAttention):
    """Replace the windowed attention of Swin."""

    host = swin_transformer.WindowAttention
    projections = Packed("qkv")
    biased = True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside windows.

        Args:
            x: [B·W, N, E], the W windows of each image.
            mask: [W, N, N], -100 where the shift has brought together what is apart, else 0.

        Returns:
            [B·W, N, E].
        """
        added = self._get_rel_pos_bias()  # [1, H, N, N]
        if mask is not None:
            hides = mask.masked_fill(mask < 0, -torch.inf)[:, None]  # [W, 1, N, N]
            added = (added + hides).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)  # [B·W, H, N, N]
        return self.proj_drop(self.proj(self.attend(*self.project(x), added)))


class CrossAttention(Replacement, crossvit.CrossAttention):
    """Replace the cross-attention of CrossViT: the class token attends to all tokens."""

    host = crossvit.CrossAttention
    projections = Separate("wq", "wk", "wv")
    cross = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, 1, E] of x [B, M, E]."""
        q, k, v = self.by_heads(self.wq(x[:, :1]), self.wk(x), self.wv(x))
        return self.proj_drop(self.proj(self.attend(q, k, v)))


class ClassAttention(Replacement, cait.ClassAttn):
    """Replace the class attention of CaiT."""

    host = cait.ClassAttn
    projections = Separate("q", "k", "v")
    cross = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, 1, E] of x [B, M, E]."""
        q, k, v = self.by_heads(self.q(x[:, :1]), self.k(x), self.v(x))
        return self.proj_drop(self.proj(self.attend(q, k, v)))


REPLACEMENTS: dict[type[nn.Module], type[Replacement]] = {
    kind.host: kind
    for kind in (
        Attention,
        AttentionRope,
        EvaAttention,
        BeitAttention,
        WindowAttention,
        CrossAttention,
        ClassAttention,
    )
}
"""Host class -> its replacement."""
