"""Attention: projections around a mechanism, with masks and a cache."""

from typing import Any

import torch
from torch import Tensor, nn

from .cache import Cache
from .compat import is_same
from .config import AttentionConfig, AttentionSpec
from .errors import ConfigError, InputError, UnsupportedError, check_sizes
from .mechanism import Mechanism, head_sizes
from .ops import merge_masks
from .projections import Projected, Separate, init_norms


class Attention(Projected):
    """Self- or cross-attention with query, key, value and output projections.

    >>> layer = Attention(256, 8, "quest")
    >>> y = layer(x)                                   # self-attention, x: [B, N, 256]
    >>> y = layer(x, context, key_mask=real)           # cross-attention, real: [B, M], True = may be attended to
    >>> y = layer(token, is_causal=True, cache=cache)  # one step of decoding

    Args:
        embed_dim: features E of the input and the output.
        num_heads: query heads H.
        attention: a name, mapping or AttentionConfig.
        context_dim: features of `context`; `embed_dim` by default.
        head_dim: features D a head; E / H by default.
        bias: whether the projections have a bias.
        dropout: dropout on the attention weights while training.
        device, dtype: of the parameters.

    Raises:
        ConfigError: unknown mechanism or option, or sizes that do not divide.
    """

    projections = Separate("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: AttentionSpec = "quest",
        *,
        context_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, context_dim=context_dim, head_dim=head_dim)
        if head_dim is None and embed_dim % num_heads:
            raise ConfigError(f"embed_dim is {embed_dim}, which the {num_heads} heads do not divide; give head_dim")
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout is {dropout}; it is a probability in [0, 1)")
        self.config = AttentionConfig.parse(attention)
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.head_sizes = head_sizes(self.config, num_heads, self.head_dim)
        self.dropout = dropout
        source = embed_dim if context_dim is None else context_dim
        factory = {"device": device, "dtype": dtype}
        q_rows, k_rows, v_rows = self.head_sizes.widths
        self.q_proj = nn.Linear(embed_dim, q_rows, bias, **factory)
        self.k_proj = nn.Linear(source, k_rows, bias, **factory)
        self.v_proj = nn.Linear(source, v_rows, bias, **factory)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, embed_dim, bias, **factory)
        mechanism = Mechanism(self.config, num_heads=num_heads, head_dim=self.head_dim, projected=True)
        self.mechanism = mechanism.to(**factory)
        init_norms(self)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attend from `x` to `context` (by default `x`); `is_causal` is aligned at the last query: j ≤ i + M − N.

        Args:
            x: [B, N, E].
            context: [B, M, C].
            key_mask: [B, M] boolean, True where a key may be attended to (False = padding).
            attn_mask: boolean (True = may attend) or additive, [N, M] or broadcastable to [B, H, N, M].
            cache: the state of earlier tokens; it is extended by `x`, and M counts both.

        Returns:
            [B, N, E].

        Raises:
            InputError: shapes, types or a mask that do not fit together, or a cache with `context` or without
                `is_causal`.
            UnsupportedError: as in `Mechanism.forward` and `Mechanism.decode`.
        """
        for name, tokens in (("x", x), ("context", context)):
            if tokens is not None and tokens.dim() != 3:
                raise InputError(f"{name} has shape {list(tokens.shape)}; it needs three axes: batch, tokens, features")
        if context is None and self.k_proj.in_features != self.q_proj.in_features:
            raise InputError(f"this layer attends to a context of {self.k_proj.in_features} features; pass `context`")
        unfit = [part.name for part in self.config.components if not part.cross] if context is not None else []
        if unfit:
            raise UnsupportedError(f"attention '{self.config}': '{unfit[0]}' cannot attend to another sequence")
        if cache is not None and context is not None:
            raise InputError("cache holds the keys of x itself; project a fixed context without one")
        if cache is not None and not is_causal:
            raise InputError("a cache is for causal decoding; say is_causal=True, or leave it out")
        dropout_p = self.dropout if self.training else 0.0
        source = x if context is None else context
        # Heads are counted from the width: tensor parallelism leaves each rank some of them.
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, N, D]
        k = self.k_proj(source).unflatten(-1, (-1, self.head_sizes.key_dim)).transpose(1, 2)  # [B, G, M, Dk]
        v = self.v_proj(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, G, M, D]
        mask = attn_mask
        if key_mask is not None:
            wanted = (x.shape[0], source.shape[1] + (0 if cache is None else len(cache)))
            if key_mask.shape != wanted or key_mask.dtype != torch.bool:
                raise InputError(
                    f"key_mask is {key_mask.dtype} of shape {list(key_mask.shape)}; it needs booleans of shape "
                    f"[B, M] = {list(wanted)}, True where a key may be attended to"
                )
            typed = mask is None or mask.dtype == torch.bool or mask.is_floating_point()
            if mask is not None and not (typed and mask.dim() in (2, 4)):
                raise InputError(
                    f"attn_mask is {mask.dtype} of shape {list(mask.shape)}; it is boolean (True = may attend) or "
                    "floating point, [N, M] or [B, H, N, M] (a mask per sample [B, N, M] is written mask[:, None])"
                )
            same_tokens = is_same(source, x) and cache is None
            mask = merge_masks(mask, self.mechanism.padding_mask(key_mask, same_tokens=same_tokens))
        if cache is None:
            out = self.mechanism(q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=dropout_p, x=x)
        else:
            out = self.mechanism.decode(q, k, v, cache, attn_mask=mask, dropout_p=dropout_p, x=x)
        merged: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))  # [B, N, E]
        return merged
