"""tsai's attention modules with another mechanism inside.

Each class takes the arguments of one host module and keeps that module's sub-modules under their names, so parameter
names and shapes stay if the mechanism has no parameters. With fewer key/value heads (gqa, mqa) the key and value
projections are smaller, and a host checkpoint is pooled on load.

tsai always forms the attention weights. The classes here form them only if the host passes scores from layer to layer
(`res_attention`), stores the weights (`store_attn`), has a forward hook on the module, or drops weights (as tsai drops
them, so that a seeded run draws the same masks). Otherwise the mechanism's fused path runs.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.errors import InputError
from quest_core.mechanism import Mechanism, head_sizes
from quest_core.projections import Packed, Projected, Separate, shallow_copy


def plain(x: Tensor) -> Tensor:
    """Return `x` without fastai's tensor subclass, whose dispatch costs more than a small operation."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, heads·D] -> [B, heads, N, D], a view."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H·D]."""
    return x.transpose(1, 2).flatten(2)


def split_masks(attn_mask: Tensor | None, seen: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Convert tsai's two masks into a boolean mask of hidden keys and an additive mask.

    Args:
        attn_mask: [N, M] or broadcastable to [B, H, N, M]; boolean (True = hidden) or additive.
        seen: False = padding, broadcastable to [B, H, N, M].

    Returns:
        Boolean and additive mask, each with four axes or None.
    """
    hidden = added = None
    if attn_mask is not None:
        attn_mask = plain(attn_mask)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]  # [.., .., N, M]
        if attn_mask.dtype == torch.bool:
            hidden = attn_mask
        else:
            added = attn_mask
    if seen is not None:
        hidden = ~seen if hidden is None else hidden | ~seen
    return hidden, added


class Core(nn.Module):
    """Compute scores, weights and output; it replaces tsai's ScaledDotProductAttention.

    Args:
        config: the mechanism.
        num_heads: query heads H.
        head_dim: features D a query/key head.
        factor: the host's factor on q·k, used by every score that has a factor 1/√D of its own.
        dropout: the host's dropout on the weights, or None.
        scale: the host's `scale` parameter, kept because it is a key of the host's state dict. If it is learnable
            (``lsa=True``), it is the factor.
        gives_scores: whether the host passes scores on to the next layer.
        gives_weights: whether the host reads the weights.
    """

    def __init__(
        self,
        config: AttentionConfig,
        num_heads: int,
        head_dim: int,
        *,
        factor: float,
        dropout: nn.Module | None = None,
        scale: nn.Parameter | None = None,
        gives_scores: bool = False,
        gives_weights: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.gives_scores, self.gives_weights = gives_scores, gives_weights
        self.attn_dropout: Any = dropout
        self.learns_scale = scale is not None and scale.requires_grad
        if scale is not None:
            self.scale = scale
        standard_scale = 1.0 if self.learns_scale else factor
        self.mechanism = Mechanism(config, num_heads=num_heads, head_dim=head_dim, standard_scale=standard_scale)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev: Tensor | None = None,
        hidden: Tensor | None = None,
        added: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output [B, H, N, Dv], and the weights and scores [B, H, N, M] or None if they were not formed.

        Args:
            q: [B, H, N, D].
            k: [B, G, M, D] and v: [B, G, M, Dv].
            prev: scores of the previous layer [B, H, N, M].
            hidden: boolean, True = may not attend, broadcastable to [B, H, N, M].
            added: added to the scores, broadcastable to [B, H, N, M].
            need_weights: form the weights even if the host does not read them.
        """
        if self.learns_scale:
            q = q * self.scale
        dropout_p = self._dropout_p()
        # A family has no weights: it is refused if the host reads them, and a hook gets None.
        wanted = self.mechanism.family is None and (need_weights or dropout_p > 0 or bool(self._forward_hooks))
        mask = _one_mask(hidden, added)
        if prev is None and not (self.gives_scores or self.gives_weights or wanted):
            return self.mechanism(q, k, v, attn_mask=mask, dropout_p=dropout_p), None, None
        out, weights, scores = self.mechanism.forward_with_logits(
            q, k, v, residual=None if prev is None else plain(prev), attn_mask=mask, dropout_p=dropout_p
        )
        return out, weights, scores if self.gives_scores else None

    def _dropout_p(self) -> float:
        dropout = self.attn_dropout
        return dropout.p if dropout is not None and dropout.training else 0.0


def _one_mask(hidden: Tensor | None, added: Tensor | None) -> Tensor | None:
    if hidden is None:
        return added
    if added is None:
        return ~hidden
    return added.masked_fill(hidden, -math.inf)


class Replacement(Projected):
    """Base of all replacements: the host's sub-modules, with smaller key/value projections where heads are fewer."""

    core: ClassVar[str]
    """Name of the Core: the host's name for its own core, if it has one."""

    config: AttentionConfig
    num_heads: int

    @classmethod
    def from_host(
        cls, host: nn.Module, config: AttentionConfig, num_heads: int, core: Core, *, fresh: bool
    ) -> Replacement:
        """Return a module with the host's attributes and sub-modules; `host` itself is not changed.

        Raises:
            InputError: `host` is a replacement whose keys and values were reduced already.
        """
        head_dim = core.head_dim
        # What has been replaced before says how wide a value is; its W_V may have fewer heads than the host's.
        value_dim = host.head_sizes.value_dim if isinstance(host, Replacement) else getattr(host, "d_v", head_dim)
        made: Replacement = shallow_copy(host, cls)
        made.config, made.num_heads = config, num_heads
        made.head_sizes = head_sizes(config, num_heads, head_dim, value_dim)
        made._modules[cls.core] = core
        anchor: Any = made.get_submodule(cls.projections.entries[0][0]).weight
        core.mechanism.to(device=anchor.device, dtype=anchor.dtype)
        core.train(host.training)
        made.projections.shrink(made, made.head_sizes, fresh=fresh)
        return made


class MultiheadAttention(Replacement):
    """Replace tsai's MultiheadAttention (TSTPlus, TSiTPlus, PatchTST)."""

    projections = Separate("W_Q", "W_K", "W_V")
    core: ClassVar[str] = "sdp_attn"
    output: ClassVar[str] = "to_out"

    def forward(
        self,
        Q: Tensor,
        K: Tensor | None = None,
        V: Tensor | None = None,
        prev: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend over embeddings.

        Args:
            Q: [B, N, E]; K, V: [B, M, E], Q by default.
            prev: scores of the previous layer [B, H, N, M].
            key_padding_mask: [B, M], True = padding.
            attn_mask: [N, M] or broadcastable to [B, H, N, M]; boolean (True = may not attend) or additive.

        Returns:
            The output [B, N, E] and the weights [B, H, N, M], or None if they were not formed; with the host's
            `res_attention` also the scores [B, H, N, M].
        """
        tokens, Q = Q, plain(Q)  # `plain` makes a new object, so compare with the original
        K = Q if K is None or K is tokens else plain(K)
        V = Q if V is None or V is tokens else plain(V)
        core: Core = self.sdp_attn
        q = split_heads(self.W_Q(Q), self.num_heads)  # [B, H, N, D]
        k = split_heads(self.W_K(K), self.kv_heads)  # [B, G, M, D]
        v = split_heads(self.W_V(V), self.kv_heads)  # [B, G, M, Dv]
        seen = None
        if key_padding_mask is not None:
            real = plain(key_padding_mask) == 0  # [B, M]; tsai marks padding by True or by a number
            seen = core.mechanism.padding_mask(real, same_tokens=K is Q)
        hidden, added = split_masks(attn_mask, seen)
        out, weights, scores = core(q, k, v, prev, hidden, added, need_weights=bool(self._forward_hooks))
        out = getattr(self, self.output)(merge_heads(out))
        return (out, weights, scores) if core.gives_scores else (out, weights)


class TabularAttention(MultiheadAttention):
    """Replace the attention of TabTransformer and TabFusionTransformer."""

    output: ClassVar[str] = "W_O"

    def forward(  # type: ignore[override]  # the host's own order of arguments
        self, Q: Tensor, K: Tensor, V: Tensor, prev: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Any:
        """As MultiheadAttention, without padding."""
        return super().forward(Q, K, V, prev, attn_mask=attn_mask)


class PlainAttention(MultiheadAttention):
    """Replace the attention of TST and of RNN/LSTM/GRUAttention, which build their core inside `forward`."""

    output: ClassVar[str] = "W_O"

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        """As MultiheadAttention; mask [N, M], True = may not attend (tsai declares the argument and ignores it)."""
        return super().forward(Q, K, V, attn_mask=mask)


class PerceiverAttention(Replacement):
    """Replace the cross- and self-attention of TSPerceiver."""

    projections = Separate(q="to_q") + Packed("to_kv", roles="kv")
    core: ClassVar[str] = "attn"

    def forward(self, x: Tensor, context: Tensor | None = None, mask: None = None) -> Any:
        """Attend from x to a context.

        Args:
            x: [B, N, E].
            context: [B, M, C]; x by default.
            mask: must be None.

        Returns:
            [B, N, E]; with the host's `res_attention` also the scores [B, H, N, M].

        Raises:
            InputError: a mask was given, which tsai ignores.
        """
        if mask is not None:
            raise InputError("TSPerceiver's attention takes no mask: tsai declares the argument and ignores it")
        x = plain(x)
        q = split_heads(self.to_q(x), self.num_heads)  # [B, H, N, D]
        k, v = self.to_kv(x if context is None else plain(context)).chunk(2, dim=-1)
        k, v = split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)  # [B, G, M, D]
        core: Core = self.attn
        out, _, scores = core(q, k, v)
        out = self.to_out(merge_heads(out))
        return (out, scores) if core.gives_scores else out


class ConvTranAttention(Replacement):
    """Replace the three attentions of ConvTran, which add nothing, a bias after the softmax (`relative_bias_table`), or
    relative vectors before it (`Er`)."""

    projections = Separate("query", "key", "value")
    core: ClassVar[str] = "sdp_attn"

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        x = plain(x)
        q = split_heads(self.query(x), self.num_heads)  # [B, H, N, D]
        k, v = split_heads(self.key(x), self.kv_heads), split_heads(self.value(x), self.kv_heads)  # [B, G, N, D]
        added = None
        if hasattr(self, "Er"):
            added = self.relative_scores(q) * self.scale
        out = self.sdp_attn(q, k, v, added=added)[0]
        if hasattr(self, "relative_bias_table"):
            out = out + self.relative_bias() @ v.repeat_interleave(self.num_heads // self.kv_heads, dim=1)
        merged: Tensor = self.to_out(merge_heads(out))
        return merged

    def relative_bias(self) -> Tensor:
        """Return what ConvTran adds to the attention weights by relative position [H, N, N]."""
        n = self.seq_len
        table = self.relative_bias_table  # [2·N − 1, H]
        return table[self.relative_index.flatten()].view(n, n, -1).permute(2, 0, 1)

    def relative_scores(self, q: Tensor) -> Tensor:
        """Return queries times relative vectors [B, H, N, N], shifted so that row i, column j has the offset j − i."""
        scores = nn.functional.pad(q @ self.Er.transpose(0, 1), (1, 0))  # [B, H, N, 1 + N]
        b, h, rows, columns = scores.shape
        return scores.reshape(b, h, columns, rows)[:, :, 1:, :]
