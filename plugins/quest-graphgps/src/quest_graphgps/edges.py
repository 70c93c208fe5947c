"""EdgeAttention: PyTorch Geometric's TransformerConv, whose queries meet only the keys at the other ends of edges."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch_geometric.nn import TransformerConv
from torch_geometric.utils import softmax

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Capabilities, HostAttention
from quest_core.projections import Separate, init_norms


class EdgeAttention(HostAttention, TransformerConv):  # type: ignore[misc]
    """Drop-in for TransformerConv, with any score whose logit is that of one query and one key, under a softmax.

    A key is what the host takes for one: the projected source node, plus the projected feature of the edge.
    """

    projections = Separate("lin_query", "lin_key", "lin_value")
    capabilities: ClassVar[Capabilities] = Capabilities(ordered=False, cross=True, regroups=False)

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        return {"num_heads": host.heads, "head_dim": host.out_channels}

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        return replace(cls.capabilities, dropout=host.dropout > 0)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        for part in config.components:
            if part.reads or not part.leaves_softmax():
                return f"'{part.name}' needs all keys of a query, and here it meets those of its edges one by one"
        return None

    def reset_parameters(self) -> None:
        """Start the parameters as TransformerConv does, and those of the mechanism."""
        super().reset_parameters()
        self.mechanism.reset_parameters()
        init_norms(self)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Do nothing: PyTorch Geometric calls it for a copy, and would have explainers use the `propagate` below.

        They need the host's, which masks edges.
        """

    def propagate(self, edge_index: Any, **given: Any) -> Tensor:
        """Propagate as the host does; keys without a feature of the edge are scored once a node, not once an edge."""
        if self._scores_nodes:
            given["query"], given["key"] = self._score(given["query"], given["key"])
        return super().propagate(edge_index, **given)  # type: ignore[no-any-return]

    @property
    def _scores_nodes(self) -> bool:
        watched = self.mechanism.monitor is not None or "propagate" in vars(self)  # by an explainer, which skips ours
        return self.lin_edge is None and not self.mechanism.is_standard and not watched

    def _score(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [N, H, C] and k [M, H, C] of which logits are the products."""
        q, k = (x.transpose(0, 1)[None] for x in (q, k))  # [1, H, N, C]
        q, k, scale = self.mechanism.score(q, k, k, mask=None, is_causal=False)
        return (q * scale)[0].transpose(0, 1), k[0].transpose(0, 1)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: Tensor | None,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        """Return what each edge adds to its target node, [E, H, C]; arguments as in the host, of E edges."""
        given, monitor = (query_i, key_j, value_j, edge_attr, index, ptr, size_i), self.mechanism.monitor
        if self.mechanism.is_standard and monitor is None:
            return super().message(*given)  # type: ignore[no-any-return]
        if self.lin_edge is not None:
            edge_attr = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            key_j = key_j + edge_attr
        if edge_attr is not None:
            value_j = value_j + edge_attr
        q, k = (query_i, key_j) if self._scores_nodes else self._score(query_i, key_j)
        logits = (q * k).sum(-1)  # [E, H]
        for layer in monitor or ():
            layer.saw_pairs(query_i, key_j, logits, index, size_i)
        if self.mechanism.is_standard:
            return super().message(*given)  # type: ignore[no-any-return]
        weights = softmax(logits, index, ptr, size_i)
        self._alpha = weights
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return value_j * weights[..., None]
