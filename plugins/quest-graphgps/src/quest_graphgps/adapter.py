"""GraphGPSAdapter: where the attention of PyTorch Geometric's and GraphGPS's graph Transformers is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.catalogue import parts
from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site
from quest_core.hosts.discovery import require_host
from quest_core.hosts.injection import inject
from quest_core.hosts.patching import when_imported
from quest_core.hosts.torch import TorchAdapter

from . import graphgym
from .attention import GraphAttention
from .info import INFO

HOSTS: dict[tuple[str, str], str] = {
    ("torch_geometric.nn.conv.gps_conv", "GPSConv"): "attn",
    ("graphgps.layer.gps_layer", "GPSLayer"): "self_attn",
    ("graphgps.layer.graphormer_layer", "GraphormerLayer"): "attention",
    ("quest_graphgps.bench.gps", "GPSLayer"): "self_attn",
}
"""Host layer (module, class) -> the name under which it holds its torch.nn.MultiheadAttention."""


class GraphGPSAdapter(TorchAdapter):
    """The global attention of GPSConv, GPSLayer and GraphormerLayer, and of their subclasses.

    What these hosts build of torch.nn.MultiheadAttention elsewhere (in encoders of positions, in set poolings) belongs
    to quest_core's own adapter.
    """

    name: ClassVar[str] = "graphgps"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Every global attention that is torch.nn.MultiheadAttention, or was; not Performer's nor BigBird's."""
        index = 0
        for path, layer in model.named_modules():
            name = _attention_name(layer)
            module = getattr(layer, name) if name else None
            if isinstance(module, nn.MultiheadAttention):
                # Graphormer's layers ask for the weights and drop them; GPSLayer keeps them in one of its modes.
                reads = name == "attention" or bool(getattr(layer, "log_attn_weights", False))
                asked = Capabilities(ordered=False, weights=reads, dropout=module.dropout > 0)
                place = f"{path}.{name}" if path else str(name)
                yield Site(place, module, index, module.num_heads, module.head_dim, asked)
                index += 1

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        assert isinstance(site.module, nn.MultiheadAttention)
        return GraphAttention.from_torch(site.module, config, fresh=site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Beside what capabilities say: the attention-free families that need an order have one that does not."""
        why = Adapter.refusal(self, site, config)
        if why is not None and any(part.ordered for part in config.specs()):
            return f"{why}, and the nodes of a graph have none; 'aft-simple' is its relative that needs no order"
        return why

    def install(self) -> None:
        """Let GPSConv, GraphGym and GraphGPS accept `attention`, each as soon as it is imported.

        Raises:
            PluginError: PyTorch Geometric is not installed or of a version that this plugin does not support.
        """
        require_host(self.name)
        when_imported("torch_geometric.nn.conv.gps_conv", _accept_in_gps_conv)
        graphgym.install()


def _attention_name(layer: nn.Module) -> str | None:
    """The attribute of a host layer that holds its attention; None for any other module."""
    names = (HOSTS.get((kind.__module__, kind.__name__)) for kind in type(layer).__mro__)
    return next(filter(None, names), None)


def _accept_in_gps_conv() -> None:
    """Wrap GPSConv.__init__ in place, once: `attn_kwargs` takes `attention` beside the arguments of the attention."""
    from torch_geometric.nn.conv.gps_conv import GPSConv

    stock: Any = GPSConv.__init__
    if hasattr(stock, "accepts_attention"):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options)
        attn_kwargs = dict(given.arguments.get("attn_kwargs") or {})
        if "attention" not in attn_kwargs:
            stock(self, *arguments, **options)
            return
        attention = attn_kwargs.pop("attention")
        if attention is None:  # as a search over hyper-parameters names the stock model
            given.arguments["attn_kwargs"] = attn_kwargs
            stock(*given.args, **given.kwargs)
            return
        config = AttentionConfig.parse(attention)
        kind = given.arguments.get("attn_type", "multihead")
        if kind != "multihead":
            raise UnsupportedError(
                f"GPSConv: attn_kwargs has attention={attention!r}, which replaces attn_type='multihead', but "
                f"attn_type is {kind!r}; leave out one of the two"
            )
        known = inspect.signature(nn.MultiheadAttention).parameters
        ours = {option.name for part in parts().values() for option in part.options} - set(known)
        for name in ours & set(attn_kwargs):
            example = {**config.to_dict(), name: attn_kwargs[name]}
            raise ConfigError(
                f"GPSConv: attn_kwargs has {name}={attn_kwargs[name]!r}, an option of the attention and not of "
                f"torch.nn.MultiheadAttention; write attn_kwargs={{'attention': {example}}}"
            )
        given.arguments["attn_kwargs"] = attn_kwargs
        stock(*given.args, **given.kwargs)
        inject(self, config, adapter=GraphGPSAdapter(), fresh=True)

    __init__.accepts_attention = True  # type: ignore[attr-defined]
    GPSConv.__init__ = __init__
