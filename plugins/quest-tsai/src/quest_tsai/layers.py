"""tsai's attention modules with another mechanism inside.

Each class takes the arguments of one host module and keeps that module's sub-modules under their names, so parameter
names and shapes stay if the mechanism has no parameters. With fewer key/value heads (gqa, mqa) the key and value
projections are smaller, and a host checkpoint is pooled on load.

tsai always forms the attention weights. The classes here form them only if the host passes scores from layer to layer
(`res_attention`), stores the weights (`store_attn`), has a forward hook on the module, or drops weights (as tsai drops
them, so that a seeded run draws the same masks). Otherwise the mechanism's fused path runs.
"""

import dataclasses
import math
from typing import Any

from torch import Tensor, nn
from tsai.models.ConvTranPlus import Attention_Rel_Vec

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Capabilities, HostAttention
from quest_core.mechanisms import Dims
from quest_core.ops import mask_of_host
from quest_core.projections import Packed, Separate


def plain(x: Tensor) -> Tensor:
    """Return `x` without fastai's tensor subclass, whose dispatch costs more than a small operation."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)


class Replacement(HostAttention):
    """Base of all replacements: the host's sub-modules around a mechanism.

    tsai's own core `sdp_attn` stays, because it holds the dropout and `scale`, a key of the host's state dict.

    Attributes:
        reads_weights: whether the host reads the weights.
        scaled: whether the score takes its factor from the host's parameter `scale`.
    """

    reads_weights: bool
    scaled: bool
    drops_weights = True

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads and the factor on q·k."""
        scale = getattr(host, "scale", None)  # ConvTran: of the whole width, not of one head
        if hasattr(getattr(host, "sdp_attn", None), "scale"):
            # tsai takes the factor from the width of the model, also where d_k says otherwise.
            scale = (host.W_Q.in_features // host.n_heads) ** -0.5
        width = getattr(host, cls.projections.entries[0][0]).out_features
        own = {"num_heads": host.n_heads, "head_dim": width // host.n_heads, "value_dim": getattr(host, "d_v", None)}
        return {**own, "standard_scale": scale}

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        """Return what a module asks for, also by the module around it."""
        parent = model.get_submodule(path.rpartition(".")[0])
        reads = bool(getattr(host, "res_attention", 0) or getattr(parent, "store_attn", 0))
        drop = getattr(getattr(host, "sdp_attn", None), "attn_dropout", None)
        return dataclasses.replace(
            cls.capabilities,
            cross=type(parent).__name__ == "CrossAttention",  # of TSPerceiver
            weights=cls.capabilities.weights or reads,
            dropout=drop is not None and drop.p > 0,
            pairs=hasattr(host, "Er"),  # ConvTran's relative positions
        )

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Return why a module cannot honor `config`: a learnable scale, or scores passed on."""
        if config.family and getattr(host, "res_attention", False):
            return (
                f"tsai passes scores from layer to layer, and '{config}' has none; build with res_attention=False "
                "(arch_config={'res_attention': False})"
            )
        if bool(getattr(getattr(host, "sdp_attn", None), "lsa", False)) and not takes_scale(config):
            return f"lsa=True learns a scale for the standard score, which '{config}' replaces; build with lsa=False"
        regrouped = any(part.axis == "grouping" and "heads" in part.reads for part in config.components)
        if regrouped and hasattr(host, "relative_bias_table"):
            return f"ConvTran's bias after the softmax belongs to heads in equal groups, which '{config}' does not keep"
        return None

    @classmethod
    def adopt(cls, host: Any, config: AttentionConfig, **sizes: Any) -> Any:
        """Return the draft of a replacement; see `HostAttention.adopt`."""
        made = super().adopt(host, config, **sizes)
        made.scaled = hasattr(getattr(host, "sdp_attn", None), "scale") and takes_scale(config)
        return made

    def attend_with_scores(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, prev: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output [B, N, H·Dv], and the weights and scores [B, H, N, M] or None if they were not formed.

        Arguments as of `attend`; `prev` are the scores of the previous layer [B, H, N, M].
        """
        core: Any = getattr(self, "sdp_attn", None)
        drop = getattr(core, "attn_dropout", None)
        dropout_p = drop.p if drop is not None and drop.training else 0.0
        if self.scaled:  # fastai's unfreeze trains the parameter also without lsa; untrained, the ratio is 1
            q = q * (core.scale / self.mechanism.dims.standard_scale)  # type: ignore[union-attr,operator]
        # A family has no weights: it is refused if the host reads them, and a hook gets None.
        formed = self.reads_weights or dropout_p > 0 or bool(self._forward_hooks)
        weights = scores = None
        if formed and self.mechanism.family is None:
            out, weights, scores = self.mechanism.forward_with_logits(
                q, k, v, residual=prev if prev is None else plain(prev), attn_mask=mask, dropout_p=dropout_p
            )
        else:
            out = self.mechanism(q, k, v, attn_mask=mask, dropout_p=dropout_p)
        return out.transpose(1, 2).flatten(2), weights, scores


def takes_scale(config: AttentionConfig) -> bool:
    """Return whether the factor on q·k is the host's, because the score has none of its own."""
    score = config.components[0]
    dims = Dims(1, 1, 1, standard_scale=math.inf)  # no option can be that
    built: Any = config.build(score, dims)
    return score.axis == "score" and built.scale(1) == math.inf


class MultiheadAttention(Replacement):
    """Replace the attention of TSTPlus, TSiTPlus and PatchTST."""

    projections = Separate("W_Q", "W_K", "W_V")

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
            prev: scores of the previous layer [B, H, N, M], which only a host with `res_attention` adds.
            key_padding_mask: [B, M], True = padding.
            attn_mask: [N, M] or broadcastable to [B, H, N, M]; boolean (True = may not attend) or additive.

        Returns:
            The output [B, N, E] and the weights [B, H, N, M], or None if they were not formed; with the host's
            `res_attention` also the scores [B, H, N, M].
        """
        tokens, Q = Q, plain(Q)  # `plain` makes a new object, so compare with the original
        K = Q if K is None or K is tokens else plain(K)
        V = Q if V is None or V is tokens else plain(V)
        q, k, v = self.split(self.W_Q(Q), self.W_K(K), self.W_V(V))  # [B, H, N, D], [B, G, M, D], [B, G, M, Dv]
        seen = None
        if key_padding_mask is not None:
            real = plain(key_padding_mask) == 0  # [B, M]; tsai marks padding by True or by a number
            seen = self.mechanism.padding_mask(real, same_tokens=K is Q)
        if attn_mask is not None:
            attn_mask = plain(attn_mask)[(None,) * (4 - attn_mask.dim())]  # [.., .., N, M]
        passes = getattr(self, "res_attention", False)
        out, weights, scores = self.attend_with_scores(q, k, v, mask_of_host(attn_mask, seen), prev if passes else None)
        out = self.to_out(out) if hasattr(self, "to_out") else self.W_O(out)
        return (out, weights, scores) if passes else (out, weights)


class UnmaskedAttention(MultiheadAttention):
    """Replace the attention of TST and RNN/LSTM/GRUAttention, which declare a mask and ignore it."""

    def forward(  # type: ignore[override]
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> Any:
        """Attend over embeddings; see `MultiheadAttention.forward`."""
        return super().forward(Q, K, V)


class TabularAttention(MultiheadAttention):
    """Replace the attention of TabTransformer and TabFusionTransformer, over columns."""

    capabilities = Capabilities(ordered=False, weights=True)  # the layers store them

    def forward(  # type: ignore[override]
        self, Q: Tensor, K: Tensor, V: Tensor, prev: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Any:
        """Attend over embeddings; see `MultiheadAttention.forward`."""
        return super().forward(Q, K, V, prev, attn_mask=attn_mask)


class PerceiverAttention(Replacement):
    """Replace the cross- and self-attention of TSPerceiver."""

    projections = Separate(q="to_q") + Packed("to_kv", roles="kv")
    capabilities = Capabilities(ordered=False)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend from x [B, N, E] to a context [B, M, C], x by default; returns [B, N, E]. tsai ignores `mask` too."""
        x = plain(x)
        k, v = self.to_kv(x if context is None else plain(context)).chunk(2, dim=-1)
        out = self.attend_with_scores(*self.split(self.to_q(x), k, v))[0]
        return self.to_out(out)  # type: ignore[no-any-return]


class ConvTranAttention(Replacement):
    """Replace the three attentions of ConvTran, which add nothing, a bias after the softmax (`relative_bias_table`), or
    relative vectors before it (`Er`)."""

    projections = Separate("query", "key", "value")

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, N, E]."""
        x = plain(x)
        q, k, v = self.split(self.query(x), self.key(x), self.value(x))  # [B, H, N, D], k and v [B, G, N, D]
        added = None
        if hasattr(self, "Er"):
            added = Attention_Rel_Vec.skew(self, q @ self.Er.mT) * self.scale  # [B, H, N, N]
        out = self.attend_with_scores(q, k, v, added)[0]  # [B, N, H·D]
        if hasattr(self, "relative_bias_table"):
            n, heads = self.seq_len, self.relative_bias_table[self.relative_index.flatten()]  # [N·N, H]
            bias = heads.view(n, n, -1).permute(2, 0, 1)  # [H, N, N]
            by_head = bias @ v.repeat_interleave(self.n_heads // self.kv_heads, dim=1)  # [B, H, N, D]
            out = out + by_head.transpose(1, 2).flatten(2)
        return self.to_out(out)  # type: ignore[no-any-return]
