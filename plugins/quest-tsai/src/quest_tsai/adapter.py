"""TsaiAdapter: where tsai's attention is, and how `attention=` reaches it.

tsai copies names between its modules (``from x import *``), so a function of it has many stale copies, while a class
is one object everywhere. `install` therefore wraps the ``__init__`` of every architecture class in place: it builds
the stock model, then injects. No name is rebound, and it makes no difference whether a notebook imported tsai first.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig, AttentionSpec
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.discovery import require_host
from quest_core.hosts.injection import inject
from quest_core.hosts.torch import TorchAdapter

from .info import INFO
from .layers import (
    ConvTranAttention,
    Core,
    MultiheadAttention,
    PerceiverAttention,
    PlainAttention,
    Replacement,
    TabularAttention,
)

HOSTS: dict[tuple[str, str], type[Replacement]] = {
    ("tsai.models.layers", "MultiheadAttention"): MultiheadAttention,
    ("tsai.models.PatchTST", "_MultiheadAttention"): MultiheadAttention,
    ("tsai.models.TST", "_MultiHeadAttention"): PlainAttention,
    ("tsai.models.RNNAttention", "_MultiHeadAttention"): PlainAttention,
    ("tsai.models.RNNAttentionPlus", "_MultiHeadAttention"): PlainAttention,
    ("tsai.models.TabTransformer", "_MultiheadAttention"): TabularAttention,
    ("tsai.models.TabFusionTransformer", "_MultiheadAttention"): TabularAttention,
    ("tsai.models.TSPerceiver", "Attention"): PerceiverAttention,
    ("tsai.models.ConvTranPlus", "Attention"): ConvTranAttention,
    ("tsai.models.ConvTranPlus", "Attention_Rel_Scl"): ConvTranAttention,
    ("tsai.models.ConvTranPlus", "Attention_Rel_Vec"): ConvTranAttention,
}
"""Host class (module, name) -> what replaces it."""


class TsaiAdapter(Adapter):
    """Every attention of tsai's own. What it builds of torch.nn.MultiheadAttention belongs to quest_core's adapter."""

    name: ClassVar[str] = "tsai"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Every attention module of tsai in `model`, in the order of registration, that of the forward pass."""
        parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        index = 0
        for path, module in model.named_modules():
            made = _replacement(module)
            if made is not None:
                yield _site(path, module, index, made, parents.get(id(module)))
                index += 1

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """The host's own sub-modules around another mechanism; see quest_tsai.layers."""
        host = site.module
        made = _replacement(host)
        assert made is not None
        core = Core(config, site.num_heads, site.head_dim, **_core_arguments(host, site))
        return made.from_host(host, config, site.num_heads, core, fresh=site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Beside what capabilities say: things of tsai that belong to scores, or to equal groups of heads."""
        core = getattr(site.module, "sdp_attn", None)
        if _learns_scale(core) and (config.family or config["score"] != "standard" or config.option("scale")):
            return f"lsa=True learns a scale for the standard score, which '{config}' replaces; build with lsa=False"
        if hasattr(site.module, "Er") and config.family:
            return f"ConvTran adds relative positions to the scores, and '{config}' has none"
        if hasattr(site.module, "relative_bias_table") and (
            config.family is None and config["grouping"] in ("kdgqa", "dgqa")
        ):
            return f"ConvTran's bias after the softmax belongs to heads in equal groups, which '{config}' does not keep"
        return refusal(config, site.capabilities)

    def install(self) -> None:
        """Let every architecture class of tsai accept `attention=`; those without attention refuse it by name.

        Raises:
            PluginError: tsai is not installed or of a version that this plugin does not support.
        """
        require_host(self.name)
        from tsai.learner import all_arch_names, get_arch

        for name in dict.fromkeys(all_arch_names):
            try:
                architecture = get_arch(name)
            except ImportError:  # an architecture whose own extra package is missing can be built by nobody
                continue
            if isinstance(architecture, type):  # scikit-learn pipelines among them
                _accept(architecture)


def _replacement(module: nn.Module) -> type[Replacement] | None:
    if isinstance(module, Replacement):
        return type(module)
    return HOSTS.get((type(module).__module__, type(module).__name__))


def _site(path: str, module: Any, index: int, made: type[Replacement], parent: nn.Module | None) -> Site:
    heads: int = module.n_heads
    if made is ConvTranAttention:
        width = module.query.out_features
    else:
        width = (module.to_q if made is PerceiverAttention else module.W_Q).out_features
    # The tabular encoders store the weights always, TSTPlus and PatchTST where store_attn says so.
    stores = made is TabularAttention or getattr(parent, "store_attn", False)
    reads = bool(getattr(module, "res_attention", False) or stores)
    cross = made is PerceiverAttention and type(parent).__name__ == "CrossAttention"
    ordered = made is not TabularAttention and made is not PerceiverAttention
    core = getattr(module, made.core, None)
    drop = getattr(core, "attn_dropout", None)
    asked = Capabilities(ordered=ordered, cross=cross, weights=reads, dropout=drop is not None and drop.p > 0)
    return Site(path, module, index, heads, width // heads, asked)


def _core_arguments(host: Any, site: Site) -> dict[str, Any]:
    """What the host's core knows beside the mechanism."""
    old = getattr(host, "attn" if isinstance(host, PerceiverAttention) or hasattr(host, "to_kv") else "sdp_attn", None)
    scale = getattr(old, "scale", None)
    if scale is not None:
        # tsai takes the factor from the width of the model, also where d_k says otherwise.
        factor = (host.W_Q.in_features // site.num_heads) ** -0.5
    elif hasattr(host, "query"):
        factor = host.scale  # ConvTran: of the whole width, not of one head
    else:
        factor = site.head_dim**-0.5
    res_attention = bool(getattr(host, "res_attention", False))
    return {
        "factor": factor,
        "dropout": getattr(old, "attn_dropout", None),
        "scale": scale,
        "gives_scores": res_attention,
        "gives_weights": site.capabilities.weights,
    }


def _learns_scale(core: nn.Module | None) -> bool:
    scale = getattr(core, "scale", None)
    return isinstance(scale, nn.Parameter) and scale.requires_grad


def _accept(architecture: type[Any]) -> None:
    """Wrap the class's __init__ in place, once."""
    stock: Any = architecture.__init__
    if hasattr(stock, "accepts_attention"):
        return

    known = inspect.signature(stock).parameters.keys()

    @functools.wraps(stock)
    def __init__(self: Any, *arguments: Any, attention: AttentionSpec | None = None, **options: Any) -> None:
        for name in options.keys() - known:  # many architectures swallow options that they do not know
            if difflib.get_close_matches(name, ["attention"], cutoff=0.8):
                raise ConfigError(f"{type(self).__name__} has no option {name!r}; did you mean 'attention'?")
        if attention is None:
            stock(self, *arguments, **options)
            return
        if type(self).__name__ not in INFO["architectures"] and architecture.__name__ not in INFO["architectures"]:
            raise UnsupportedError(
                f"attention={attention!r} cannot be used in {type(self).__name__}: it has no attention that could be "
                f"replaced. Architectures of tsai that take it: {', '.join(INFO['architectures'])}"
            )
        config = AttentionConfig.parse(attention)
        stock(self, *arguments, **options)
        adapter = TsaiAdapter()
        owner = adapter if any(True for _ in adapter.sites(self)) else TorchAdapter()
        _, report = inject(self, config, adapter=owner, fresh=True)
        report.announce()

    __init__.accepts_attention = True  # type: ignore[attr-defined]
    architecture.__init__ = __init__
