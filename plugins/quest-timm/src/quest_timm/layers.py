"""timm's attention modules with another mechanism inside.

Each class inherits one of timm's, so names, parameters, `set_window_size` and initialization stay those of the host.
Only the forward is another: there is one path, whether `fused_attn` is on or off. With fewer key/value heads (gqa, mqa)
the projections are smaller, and a host checkpoint is pooled on load.
"""

import dataclasses
import re
from types import NoneType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.layers import attention as timm_attention
from timm.models import beit, cait, crossvit, eva, swin_transformer
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Capabilities, HostAttention, refuses_chained, window_bias
from quest_core.projections import Packed, Separate


class Replacement(HostAttention):
    """Attention of timm around a mechanism. A subclass inherits a host class too, and overrides `forward`."""

    rotary: ClassVar[bool] = False
    """Whether the model may turn queries and keys by their positions."""
    stacked: ClassVar[bool] = False
    """Whether each layer sees the tokens of the one before in the same order, which elliptical scores need."""

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads; their width by the scale, because not every class of timm has `head_dim`."""
        return {"num_heads": host.num_heads, "head_dim": round(host.scale**-2)}

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        """Return what a module asks for: rotary positions too, if the model makes angles, and relative ones."""
        biased = hasattr(host, "relative_position_bias_table")  # None in BEiT, whose forward may be given one
        rotary = cls.rotary and makes_angles(model)
        return dataclasses.replace(super().asks(host, path, model), rotary=rotary, pairs=biased)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Return why a module cannot honor `config`: norms, or moving windows."""
        if config.initial_norms and normalizes(host):
            return "qk_norm=True normalizes queries and keys after their projections, so initial norms have no effect"
        stacked = cls.stacked and re.search(r"^(\w+\.)?blocks\.\d+\.attn$", path)
        return None if stacked else refuses_chained(config)

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
        return self.split(q, k, v)


def makes_angles(model: nn.Module) -> bool:
    """Return whether a model turns queries and keys by positions."""
    return any(getattr(module, "rope", None) is not None for module in model.modules())


def normalizes(module: nn.Module) -> bool:
    """Return whether a norm follows the projections of queries and keys (``qk_norm=True``)."""
    return not isinstance(getattr(module, "q_norm", None), nn.Identity | NoneType)


class Attention(Replacement, timm_attention.Attention):
    """Replace the attention of ViT, DeiT, DeiT-3 and everything else that is built from timm.layers.Attention."""

    projections = Packed("qkv")
    stacked = True

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the output [B, N, E] of x [B, N, E]; attn_mask as in scaled_dot_product_attention."""
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.project(x)
        out = self.norm(self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal=is_causal))
        return self.proj_drop(self.proj(out if gate is None else out * gate))


class AttentionRope(Replacement, timm_attention.AttentionRope):
    """Replace the attention with rotary embeddings of EVA, ViT-RoPE, DINOv3 and others."""

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
        out = self.norm(self.attend(q, k, v, attn_mask, is_causal=is_causal))
        return self.proj_drop(self.proj(out if gate is None else out * gate))

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Rotate all tokens of x [B, H, N, D] but the prefix."""
        prefix = self.num_prefix_tokens
        half = getattr(self, "rotate_half", False)
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], dim=2)


class EvaAttention(AttentionRope, eva.EvaAttention):
    """Replace the attention of EVA whose keys have no bias."""

    projections = Packed("qkv") + Separate("q_proj", "k_proj", "v_proj") + Separate(q="q_bias", v="v_bias")


class BeitAttention(Replacement, beit.Attention):
    """Replace the attention of BEiT, with relative position biases of its own, shared ones, or none."""

    projections = Packed("qkv") + Separate(q="q_bias", v="v_bias")
    stacked = True
    hides_by_infinity = True

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Return the output [B, N, E] of x [B, N, E]; the biases, the shared one [H, N, N], are added to the logits."""
        added = shared_rel_pos_bias if shared_rel_pos_bias is None else shared_rel_pos_bias[None]
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            added = own if added is None else own + added
        return self.proj_drop(self.proj(self.attend(*self.project(x), added)))


class WindowAttention(Replacement, swin_transformer.WindowAttention):
    """Replace the windowed attention of Swin."""

    projections = Packed("qkv")
    hides_by_infinity = True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside the W windows of each image x [B·W, N, E]; mask [W, N, N] is as of `window_bias`."""
        added = window_bias(self._get_rel_pos_bias(), mask, len(x))  # [1 or B·W, H, N, N]
        return self.proj_drop(self.proj(self.attend(*self.project(x), added)))


class CrossAttention(Replacement, crossvit.CrossAttention):
    """Replace the cross-attention of CrossViT: the class token attends to all tokens."""

    projections = Separate("wq", "wk", "wv")
    capabilities = Capabilities(cross=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, 1, E] of x [B, M, E]."""
        q, k, v = self.split(self.wq(x[:, :1]), self.wk(x), self.wv(x))
        return self.proj_drop(self.proj(self.attend(q, k, v)))


class ClassAttention(Replacement, cait.ClassAttn):
    """Replace the class attention of CaiT."""

    projections = Separate("q", "k", "v")
    capabilities = Capabilities(cross=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, 1, E] of x [B, M, E]."""
        q, k, v = self.split(self.q(x[:, :1]), self.k(x), self.v(x))
        return self.proj_drop(self.proj(self.attend(q, k, v)))


REPLACEMENTS: dict[str, type[HostAttention]] = {
    "timm.layers.attention.Attention": Attention,
    "timm.layers.attention.AttentionRope": AttentionRope,
    "timm.models.eva.EvaAttention": EvaAttention,
    "timm.models.beit.Attention": BeitAttention,
    "timm.models.swin_transformer.WindowAttention": WindowAttention,
    "timm.models.crossvit.CrossAttention": CrossAttention,
    "timm.models.cait.ClassAttn": ClassAttention,
}
"""Host class -> its replacement."""
