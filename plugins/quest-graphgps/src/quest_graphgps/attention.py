"""GraphAttention: the multi-head attention of a graph Transformer layer, packed where padding costs more.

PyTorch Geometric and GraphGPS pad the graphs of a batch to the largest one, so one large graph among small ones costs
its square for each of them. If that is more than copying the nodes into one sequence costs, they are packed and go
through `quest_core.attention_packed`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quest_core import PackingPlan, attention_packed
from quest_core.compat import is_eager, may_read
from quest_core.hosts.adapter import Capabilities
from quest_core.hosts.torch import TorchAttention


class GraphAttention(TorchAttention):
    """Drop-in for the torch.nn.MultiheadAttention inside a graph Transformer layer.

    If a batch is packed, the outputs at real nodes are the padded result to rounding, and those at padded nodes, which
    the layers drop, are zeros. With dropout on the weights, packing draws other random numbers than the padded
    computation. `standard` promises the host's seeded training, so it packs only where nothing is dropped.
    """

    capabilities = Capabilities(ordered=False)
    packing: ClassVar[str] = "auto"
    """When to pack: "auto" where `ragged_plan` finds it cheaper, "always" or "never"."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `quest_core.MultiheadAttention.forward`: [B, N, E], key_padding_mask [B, N] (True = no node)."""
        masked = options.get("attn_mask") is not None or options.get("is_causal", False)
        plain = query is key is value and not (masked or options.get("need_weights", True))
        if plain and key_padding_mask is not None and self._may_pack(query, key_padding_mask):
            plan = ragged_plan(key_padding_mask, self.head_dim, always=self.packing == "always")
            if plan is not None:
                return self._pack(query, ~key_padding_mask, plan), None
        return super().forward(query, key, value, key_padding_mask, **options)

    def _may_pack(self, x: Tensor, hidden: Tensor) -> bool:
        plain = self.batch_first and x.dim() == 3 and not x.is_nested and self.in_proj_weight is not None
        extended = self.bias_k is not None or self.add_zero_attn
        keeps_stream = self.training and self.dropout > 0 and self.mechanism.is_standard
        whole = any(layer.whole for layer in self.mechanism.monitor or ())
        known = hidden.dtype == torch.bool and is_eager() and may_read(hidden)
        return plain and known and not whole and self.packing != "never" and not (extended or keeps_stream)

    def _pack(self, x: Tensor, real: Tensor, plan: PackingPlan) -> Tensor:
        """Return [B, N, E] of x [B, N, E], computed only at the real nodes and zero elsewhere."""
        nodes = nn.functional.linear(x[real], self.in_proj_weight, self.in_proj_bias)  # [T, (H + 2·G)·D]
        parts = nodes.split(self.head_sizes.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [T, heads, D]
        dropout_p = self.dropout if self.training else 0.0
        out = attention_packed(q, k, v, self.mechanism, cu_seqlens=plan, dropout_p=dropout_p)  # [T, H, D]
        out = self.out_proj(out.flatten(1))
        padded: Tensor = out.new_zeros(*real.shape, out.shape[-1])
        padded[real] = out
        return padded


_last: tuple[Tensor, tuple[int, bool], PackingPlan | None] | None = None
"""The padding of the latest batch, the other arguments, and the plan that followed."""


def ragged_plan(hidden: Tensor, head_dim: int, *, always: bool = False) -> PackingPlan | None:
    """Return how to pack the graphs of a batch, or None if padding costs less.

    The cost of both is counted in elements. Padding forms B·N² logits per head, and packing Σ n². Packing reads and
    writes q, k, v and the output of each node once more, 8·Σ n·D per head. No constant of a machine enters.

    All layers of a model see the same padding in different tensors. Comparing it with the previous one is faster than
    counting nodes.

    Args:
        hidden: [B, N], True for padding.
        head_dim: D, features per head.
        always: pack wherever there is a node.
    """
    global _last  # replaced as a whole, so that two threads at worst count twice
    last, rule = _last, (head_dim, always)
    if last and last[1] == rule and last[0].device == hidden.device and torch.equal(last[0], hidden):
        return last[2]
    batch, longest = hidden.shape
    lengths = longest - hidden.sum(1)  # [B]
    nodes, pairs = torch.stack([lengths.sum(), lengths.square().sum()]).tolist()
    plan = None
    if nodes and (always or batch * longest**2 - pairs > 8 * nodes * head_dim):
        with torch.inference_mode(False):  # because a training step may use the plan after an evaluation
            ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))  # [B + 1]
        plan = PackingPlan(ends, max_seqlen=longest)
    _last = (hidden.clone(), rule, plan)  # a copy, because the caller may write to its mask
    return plan
