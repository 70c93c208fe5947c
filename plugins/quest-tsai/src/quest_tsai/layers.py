"""tsai's attention modules with another mechanism inside.

Each class takes the arguments of one host module and keeps that module's sub-modules under their names, so parameter
names and shapes stay if the mechanism has no parameters. With fewer key/value heads (gqa, mqa) the key and value
projections are smaller, and a host checkpoint is pooled on load.

tsai always forms the attention weights. The classes here form them only if the host passes scores from layer to layer
(`res_attention`), stores the weights (`store_attn`), has a forward hook on the module, or drops weights (as tsai drops
them, so that a seeded run draws the same masks). Otherwise the mechanism's fused path runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.errors import InputError
from quest_core.hosts.adapter import Site
from quest_core.hosts.replacement import one_mask
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


class Core(nn.Module):
    """Compute scores, weights and output; it replaces tsai's ScaledDotProductAttention.

    Args:
        config: the mechanism.
        host: the attention module that holds the host's own core.
        old: that core, whose dropout on the weights and `scale` stay; None where the host builds it in `forward`.
        num_heads: query heads H.
        head_dim: features D a query/key head.
        gives_weights: whether the host reads the weights.

    Attributes:
        gives_scores: whether the host passes scores on to the next layer.
        learns_scale: whether `scale`, a key of the host's state dict, is a learnable factor on q·k (``lsa=True``).
    """

    def __init__(
        self, config: AttentionConfig, host: Any, old: Any, num_heads: int, head_dim: int, gives_weights: bool
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.gives_scores, self.gives_weights = bool(getattr(host, "res_attention", False)), gives_weights
        self.attn_dropout: Any = getattr(old, "attn_dropout", None)
        scale = getattr(old, "scale", None)
        self.learns_scale = learns_scale(old)
        factor = head_dim**-0.5
        if scale is not None:
            self.scale = scale
            # tsai takes the factor from the width of the model, also where d_k says otherwise.
            factor = 1.0 if self.learns_scale else (host.W_Q.in_features // num_heads) ** -0.5
        elif hasattr(host, "query"):
            factor = host.scale  # ConvTran: of the whole width, not of one head
        self.mechanism = Mechanism(config, num_heads=num_heads, head_dim=head_dim, standard_scale=factor)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prev: Tensor | None = None,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output [B, H, N, Dv], and the weights and scores [B, H, N, M] or None if they were not formed.

        Args:
            q: [B, H, N, D].
            k: [B, G, M, D] and v: [B, G, M, Dv].
            prev: scores of the previous layer [B, H, N, M].
            mask: boolean (True = may attend) or additive, broadcastable to [B, H, N, M].
            need_weights: form the weights even if the host does not read them.
        """
        if self.learns_scale:
            q = q * self.scale
        dropout_p = self.attn_dropout.p if getattr(self.attn_dropout, "training", False) else 0.0
        # A family has no weights: it is refused if the host reads them, and a hook gets None.
        wanted = self.mechanism.family is None and (need_weights or dropout_p > 0 or bool(self._forward_hooks))
        if prev is None and not (self.gives_scores or self.gives_weights or wanted):
            return self.mechanism(q, k, v, attn_mask=mask, dropout_p=dropout_p), None, None
        out, weights, scores = self.mechanism.forward_with_logits(
            q, k, v, residual=None if prev is None else plain(prev), attn_mask=mask, dropout_p=dropout_p
        )
        return out, weights, scores if self.gives_scores else None


def learns_scale(core: Any) -> bool:
    """Return whether a core of the host has a learnable factor on q·k."""
    scale = getattr(core, "scale", None)
    return isinstance(scale, nn.Parameter) and scale.requires_grad


class Replacement(Projected):
    """Base of all replacements: the host's sub-modules, with smaller key/value projections where heads are fewer."""

    core: ClassVar[str]
    """Name of the Core: the host's name for its own core, if it has one."""

    config: AttentionConfig
    num_heads: int

    @classmethod
    def from_host(cls, host: nn.Module, config: AttentionConfig, site: Site) -> Replacement:
        """Return a module with the host's attributes and sub-modules; `host` itself is not changed.

        Raises:
            InputError: `host` is a replacement whose keys and values were reduced already.
        """
        heads, head_dim = site.num_heads, site.head_dim
        # What has been replaced before says how wide a value is; its W_V may have fewer heads than the host's.
        value_dim = host.head_sizes.value_dim if isinstance(host, Replacement) else getattr(host, "d_v", head_dim)
        made: Replacement = shallow_copy(host, cls)
        made.config, made.num_heads = config, heads
        made.head_sizes = head_sizes(config, heads, head_dim, value_dim)
        old = getattr(host, cls.core, None)
        core = Core(config, host, old, heads, head_dim, site.capabilities.weights)
        weight = next(host.parameters())
        core.mechanism.to(device=weight.device, dtype=weight.dtype)
        made._modules[cls.core] = core.train(host.training)
        made.projections.shrink(made, made.head_sizes, fresh=site.fresh)
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
        if attn_mask is not None:
            attn_mask = plain(attn_mask)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]  # [.., .., N, M]
        mask = one_mask(attn_mask, seen)
        out, weights, scores = core(q, k, v, prev, mask, need_weights=bool(self._forward_hooks))
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
        out = self.sdp_attn(q, k, v, mask=added)[0]
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
