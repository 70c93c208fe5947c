"""GraphGPSAdapter: where the attention of PyTorch Geometric's and GraphGPS's graph Transformers is."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from torch_geometric.nn import GeneralConv, HGTConv
from torch_geometric.nn.aggr.utils import MultiheadAttentionBlock

from quest_core.config import AttentionConfig
from quest_core.errors import UnsupportedError
from quest_core.hosts.adapter import Adapter, HostAttention, Site
from quest_core.hosts.inject import inject
from quest_core.hosts.request import KEYS, Request
from quest_core.hosts.torch import TorchAdapter

from . import graphgym
from .attention import GraphAttention
from .edges import EdgeAttention

HOSTS: dict[tuple[str, str], tuple[str, bool]] = {
    ("torch_geometric.nn.conv.gps_conv", "GPSConv"): ("attn", False),
    ("torch_geometric.nn.aggr.utils", "MultiheadAttentionBlock"): ("attn", False),
    ("graphgps.layer.gps_layer", "GPSLayer"): ("self_attn", False),
    ("graphgps.layer.graphormer_layer", "GraphormerLayer"): ("attention", True),
}
"""Host layer (module, class) -> the name under which it holds its torch.nn.MultiheadAttention, and whether it always
asks for the weights (Graphormer's drop them)."""


class GraphGPSAdapter(TorchAdapter):
    """TransformerConv, and the global attention of GPSConv, GPSLayer, GraphormerLayer, set poolings and of subclasses.

    torch.nn.MultiheadAttention elsewhere in these hosts (encoders of positions) belongs to quest_core's own adapter.

    Args:
        independent: refuse attention by which the output of a graph depends on the others of its batch.
    """

    name: ClassVar[str] = "graphgps"
    attention = GraphAttention
    replacements: ClassVar[Mapping[str, type[HostAttention]]] = {
        "torch_geometric.nn.conv.transformer_conv.TransformerConv": EdgeAttention
    }
    leaves_alone: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("GATConv", "GATv2Conv", "SuperGATConv", "FusedGATConv", "HANConv", "RGATConv"), "additive attention, no q·k"
    )

    def __init__(self, *, independent: bool = True) -> None:
        self.independent = independent

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        asked = replace(site.capabilities, independent=self.independent)
        return super().refusal(replace(site, capabilities=asked), config)

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        return Adapter.replacement(self, module) or super().replacement(module)

    def attends(self, module: nn.Module) -> bool:
        """HGTConv and one kind of GeneralConv multiply queries with keys too."""
        kind = module.attention_type if isinstance(module, GeneralConv) and module.attention else None
        return isinstance(module, HGTConv) or kind == "dot_product"

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every TransformerConv, and every global attention that is, or was, torch.nn.MultiheadAttention."""
        for path, layer in model.named_modules():
            if self.replacement(layer) is EdgeAttention:
                yield self.site(path, layer, EdgeAttention, model)
            name, reads = _attention_of(layer)
            module = getattr(layer, name) if name else None
            if isinstance(module, nn.MultiheadAttention) and self.replacement(module):
                reads = reads or bool(getattr(layer, "log_attn_weights", False))  # a mode of GPSLayer
                pools = isinstance(layer, MultiheadAttentionBlock)  # some of them attend from seeds to nodes
                asked = replace(GraphAttention.capabilities, weights=reads, dropout=module.dropout > 0, cross=pools)
                place = f"{path}.{name}" if path else str(name)
                # A number in a name counts no layers: pma1 pools nodes, and pma2 the clusters of pma1.
                stack = re.sub(r"\b\d+\b", "*", place) if pools else None
                yield Site(place, module, module.num_heads, module.head_dim, asked, stack=stack)

    def kernel(self, site: Site, made: nn.Module) -> str:
        if isinstance(made, EdgeAttention):
            return "softmax over edges"
        packs = isinstance(made, GraphAttention) and not site.capabilities.weights
        return super().kernel(site, made) + f", packing={GraphAttention.packing}" * packs

    def change_host(self) -> None:
        """Make GPSConv, GraphGym and GraphGPS accept `attention`, each as soon as it is imported."""
        accept = functools.partial(_accept_attention, self)
        self.patches.around("torch_geometric.nn.conv.gps_conv:GPSConv", "__init__", accept)
        self.patches.around("torch_geometric.nn.conv.gps_conv:GPSConv", "__repr__", _show_attention)
        graphgym.install(self)


def _attention_of(layer: nn.Module) -> tuple[str | None, bool]:
    """Return what `HOSTS` says of a layer; (None, False) for any other module."""
    found = (HOSTS.get((kind.__module__, kind.__name__)) for kind in type(layer).__mro__)
    return next(filter(None, found), (None, False))


def _accept_attention(adapter: Adapter, stock: Callable[..., None], self: Any, *arguments: Any, **options: Any) -> None:
    """Build a GPSConv whose `attn_kwargs` may have `attention`, `attention_from` and `allow_partial`."""
    given = inspect.signature(stock).bind(self, *arguments, **options)
    attn_kwargs = given.arguments.get("attn_kwargs") or {}
    known = inspect.signature(nn.MultiheadAttention).parameters
    request = Request.read(attn_kwargs, "attn_kwargs of GPSConv", attn_kwargs.keys() - known.keys())
    kind = given.arguments.get("attn_type", "multihead")
    if request and kind != "multihead":
        raise UnsupportedError(
            f"attn_type='{kind}' has no q·k that attention='{request.attention}' could take the place of; write "
            "attn_type='multihead'"
        )
    if attn_kwargs:
        given.arguments["attn_kwargs"] = {name: x for name, x in attn_kwargs.items() if name not in KEYS}
    stock(*given.args, **given.kwargs)
    if request:
        conv, self.conv = self.conv, None  # the caller's own, which may be trained
        try:
            inject(self, **vars(request), adapter=adapter, fresh=True)
        finally:
            self.conv = conv


def _show_attention(stock: Callable[..., str], self: Any) -> str:
    """GPSConv's text says attn_type=multihead whatever the attention."""
    config = getattr(self.attn, "config", None)
    return stock(self).replace(f"attn_type={self.attn_type}", f"attn_type={config or self.attn_type}")
