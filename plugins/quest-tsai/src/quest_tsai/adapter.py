"""TsaiAdapter: where tsai's attention is, and how `attention=` reaches it.

tsai copies names between its modules (``from x import *``), so a function has many copies, while a class is one object
everywhere. `change_host` therefore wraps methods of classes where it can. A notebook may import tsai first.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.torch import TorchAdapter

from .layers import (
    ConvTranAttention,
    MultiheadAttention,
    PerceiverAttention,
    Replacement,
    TabularAttention,
    TorchAttention,
    learns_scale,
    takes_scale,
)
from .surfaces import accept, check_transfer, read_early, start_again

HOSTS: dict[str, type[Replacement]] = {
    "tsai.models.layers.MultiheadAttention": MultiheadAttention,
    "tsai.models.PatchTST._MultiheadAttention": MultiheadAttention,
    "tsai.models.TST._MultiHeadAttention": MultiheadAttention,
    "tsai.models.RNNAttention._MultiHeadAttention": MultiheadAttention,
    "tsai.models.RNNAttentionPlus._MultiHeadAttention": MultiheadAttention,
    "tsai.models.TabTransformer._MultiheadAttention": TabularAttention,
    "tsai.models.TabFusionTransformer._MultiheadAttention": TabularAttention,
    "tsai.models.TSPerceiver.Attention": PerceiverAttention,
    "tsai.models.ConvTranPlus.Attention": ConvTranAttention,
    "tsai.models.ConvTranPlus.Attention_Rel_Scl": ConvTranAttention,
    "tsai.models.ConvTranPlus.Attention_Rel_Vec": ConvTranAttention,
}
"""Host class -> its replacement."""


class TsaiAdapter(Adapter):
    """Adapter for tsai's own attention classes, and for torch.nn.MultiheadAttention in tsai's models without these."""

    name: ClassVar[str] = "tsai"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the attention modules in the order of registration, which is that of the forward pass."""
        if not any(_replacement(module) for module in model.modules()):
            homes = [m for m in model.modules() if type(m).__module__.startswith("tsai.")]
            yield from (s for s in TorchAdapter().sites(model) if any(s.module in home.modules() for home in homes))
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        modules: Iterable[tuple[str, Any]] = model.named_modules()
        for path, module in modules:
            kind = _replacement(module)
            if kind is None:
                continue
            parent = parents.get(module)
            queries = getattr(module, kind.projections.entries[0][0])
            drop = getattr(getattr(module, "sdp_attn", None), "attn_dropout", None)
            asked = Capabilities(
                ordered=kind.ordered,
                cross=type(parent).__name__ == "CrossAttention",  # of TSPerceiver
                weights=kind.stores or bool(getattr(module, "res_attention", 0) or getattr(parent, "store_attn", 0)),
                dropout=drop is not None and drop.p > 0,
            )
            yield Site(path, module, module.n_heads, queries.out_features // module.n_heads, asked)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's sub-modules around another mechanism; see quest_tsai.layers."""
        kind = _replacement(site.module)
        if kind is None:
            return TorchAttention.from_torch(site.module, config, fresh=site.fresh)  # type: ignore[arg-type]
        return kind.from_host(site.module, config, site)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why a site cannot honour `config`: its capabilities, a learnable scale, or relative positions."""
        if learns_scale(site.module) and not takes_scale(config):
            return f"lsa=True learns a scale for the standard score, which '{config}' replaces; build with lsa=False"
        if hasattr(site.module, "Er") and config.family:
            return f"ConvTran adds relative positions to the scores, and '{config}' has none"
        regrouped = any(part.axis == "grouping" and "heads" in part.reads for part in config.components)
        if regrouped and hasattr(site.module, "relative_bias_table"):
            return f"ConvTran's bias after the softmax belongs to heads in equal groups, which '{config}' does not keep"
        return refusal(config, site.capabilities)

    def change_host(self) -> None:
        """Make tsai's architectures accept `attention=` or refuse it by name, and functions for weights honour it."""
        from tsai import learner, tslearner
        from tsai.models import utils

        importlib.import_module("tsai.callback.MVP")  # it has a copy of transfer_weights
        for name in dict.fromkeys(learner.all_arch_names):
            try:
                architecture = learner.get_arch(name)
            except ImportError:  # the architecture needs another package, which is missing
                continue
            if isinstance(architecture, type):  # scikit-learn pipelines among them
                self.patches.around(architecture, "__init__", functools.partial(accept, architecture, self))
        for kind in (tslearner.TSClassifier, tslearner.TSRegressor, tslearner.TSForecaster):
            self.patches.around(kind, "__init__", read_early)
        self.patches.around(learner, "ts_learner", read_early, everywhere=True)
        self.patches.around(utils, "transfer_weights", check_transfer, everywhere=True)
        self.patches.around(utils, "apply_init", start_again, everywhere=True)


def _replacement(module: nn.Module) -> type[Replacement] | None:
    if isinstance(module, Replacement):
        return type(module)
    return HOSTS.get(f"{type(module).__module__}.{type(module).__name__}")
