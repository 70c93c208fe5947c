"""The attention of Transformer-XL (fairseq's examples/truncated_bptt) with another score.

Transformer-XL's logit of query i and key j is (q_i + u)·k_j + (q_i + w)·r_{i−j}: the relative term has a key of its
own, the projected position r. Both terms use the same score because k and r are both keys. `standard` gives the host's
logits. `quest` normalizes k and r and has no other factor, so ‖q_i + u‖ + ‖q_i + w‖ bounds every logit of row i:
neither a token nor a position draws attention from every query by the length of its key.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Capabilities, HostAttention
from quest_core.projections import Packed, Separate


class RelativeAttention(HostAttention):
    """Accepts the call of RelPartialLearnableMultiHeadAttn (transformers)."""

    # It adds relative logits to the scores; one projection makes queries, keys and values.
    capabilities = Capabilities(causal=True, weights=True, regroups=False)
    # The biases u and w are added to the queries.
    projections = Packed("qkv_net") + Separate(q="r_w_bias") + Separate(q="r_r_bias")

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads under transformers' names."""
        return {"num_heads": host.n_head, "head_dim": host.d_head}

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Refuse what needs more than queries and keys for a logit."""
        for part in config.components:
            if part.chained:
                return f"'{part.name}' changes queries by the values of tokens, and relative positions have no values"
            if part.axis == "score" and ("tokens" in part.reads or part.stateful):
                return f"'{part.name}' depends on other tokens, which relative positions are not"
            if part.axis == "score_mod":
                return f"'{part.name}' changes logits, which are sums of two products here"
        return None

    def forward(
        self,
        w: Tensor,
        r: Tensor,
        attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
        head_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> list[Tensor]:
        """Return attention over new tokens and memory, with the residual and the norm around it.

        Args:
            w: [N, B, E] the new tokens; mems: [M − N, B, E] hidden states of earlier ones.
            r: [M, E] or [M, 1, E] embeddings of the distances M − 1 … 0.
            attn_mask: [N, M] or [N, M, B or 1], nonzero = hidden.
            head_mask: multiplies the weights [N, M, B, H].

        Returns:
            [N, B, E], and with `output_attentions` the weights [N, M, B, H].
        """
        tokens = w if mems is None else torch.cat([mems, w], dim=0)
        heads = self.qkv_net(self.layer_norm(tokens) if self.pre_lnorm else tokens).chunk(3, dim=-1)
        q, k, v = (x.unflatten(2, (self.n_head, self.d_head)).permute(1, 2, 0, 3) for x in heads)  # [B, H, M, D]
        q = q[:, :, -w.shape[0] :]  # [B, H, N, D]
        positions = self.r_net(r).view(len(r), self.n_head, self.d_head).transpose(0, 1)  # [H, M, D]

        relative = self.mechanism.logits(q + self.r_r_bias[:, None], positions.expand(len(q), -1, -1, -1))
        seen = None
        if attn_mask is not None:
            seen = (attn_mask if attn_mask.dim() == 3 else attn_mask[..., None]).permute(2, 0, 1)[:, None] == 0
        _, weights, _ = self.mechanism.forward_with_logits(
            q + self.r_w_bias[:, None], k, v, residual=shift(relative), attn_mask=seen
        )
        # The host's weights have this layout, and dropout draws random numbers in the order of memory.
        weights = self.dropatt(weights.permute(2, 3, 0, 1).contiguous())  # [N, M, B, H]
        weights = weights if head_mask is None else weights * head_mask
        out = torch.einsum("nmbh,bhmd->nbhd", weights, v).flatten(2)
        out = w + self.drop(self.o_net(out))
        out = out if self.pre_lnorm else self.layer_norm(out)
        return [out, weights] if output_attentions else [out]


def shift(logits: Tensor) -> Tensor:
    """Reorder logits [B, H, N, M] from distances to keys: column c of row i moves to key c − (N − 1 − i).

    Entries without a distance belong to future keys, which the mask hides.
    """
    b, h, n, m = logits.shape
    padded = nn.functional.pad(logits, (1, 0))  # [B, H, N, 1 + M]
    return padded.reshape(b, h, m + 1, n)[:, :, 1:].reshape(b, h, n, m)
