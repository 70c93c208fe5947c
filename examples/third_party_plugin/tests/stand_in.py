"""A small framework that stands in for the host: its attention is written as in many real ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedAttention(nn.Module):
    """Self-attention of an encoder: one projection for queries, keys and values.

    Args:
        dim: features E of a token.
        num_heads: heads H; they divide `dim`.
        attn_drop: dropout on the attention weights.
    """

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """[B, N, E] -> [B, N, E]; keep [B, N], True = token, False = padding."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
        mask = None if keep is None else keep[:, None, None, :]
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GroupedAttention(nn.Module):
    """Causal self-attention of a decoder: three projections, key/value heads that query heads share, and a cache.

    Args:
        dim: features E of a token.
        num_heads: query heads H; they divide `dim`.
        num_kv_heads: key/value heads G; they divide H.
        attn_drop: dropout on the attention weights.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: "Cache | None" = None) -> Tensor:
        """[B, N, E] -> [B, N, E]; with a cache, the first call may have many tokens and the others have one."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H or G, N, D]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.extend(self, k, v)
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))  # [B, H, M, D]
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, dropout_p=dropout_p)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Cache(dict[nn.Module, tuple[Tensor, Tensor]]):
    """Keys and values of the earlier tokens of each layer, [B, G, M, D]."""

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, and keep them."""
        if layer in self:
            k, v = torch.cat([self[layer][0], k], 2), torch.cat([self[layer][1], v], 2)
        self[layer] = k, v
        return k, v


class Model(nn.Module):
    """Attention layers with residual connections.

    Args:
        dim: features E of a token.
        num_heads: attention heads.
        depth: layers.
        num_kv_heads: key/value heads of a decoder; None builds an encoder.
        attn_drop: dropout on the attention weights.
    """

    def __init__(
        self, dim: int, num_heads: int, depth: int, num_kv_heads: int | None = None, attn_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            FusedAttention(dim, num_heads, attn_drop)
            if num_kv_heads is None
            else GroupedAttention(dim, num_heads, num_kv_heads, attn_drop)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: Tensor | Cache | None = None) -> Tensor:
        """[B, N, E] -> [B, N, E]; context: `keep` [B, N] of an encoder, the cache of a decoder."""
        for layer in self.layers:
            x = x + layer(self.norm(x), context)
        return x
