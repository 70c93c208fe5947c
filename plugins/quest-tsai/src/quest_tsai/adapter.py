"""TsaiAdapter: where tsai's attention is, and how `attention=` reaches it.

tsai copies names between its modules (``from x import *``), so a function has many copies, while a class is one object
everywhere. `install` therefore wraps methods of classes where it can. A notebook may import tsai first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.discovery import require_host

from .info import INFO
from .layers import (
    ConvTranAttention,
    MultiheadAttention,
    PerceiverAttention,
    PlainAttention,
    Replacement,
    TabularAttention,
    learns_scale,
)
from .surfaces import accept, check_load, check_transfer, read_early

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
"""Host class (module, name) -> its replacement."""


class TsaiAdapter(Adapter):
    """Adapter for tsai's own attention classes; quest_core's adapter replaces torch.nn.MultiheadAttention in tsai."""

    name: ClassVar[str] = "tsai"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the attention modules in the order of registration, which is that of the forward pass."""
        parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        for path, module in model.named_modules():
            made = _replacement(module)
            if made is not None:
                yield _site(path, module, made, parents.get(id(module)))

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's sub-modules around another mechanism; see quest_tsai.layers."""
        made = _replacement(site.module)
        assert made is not None
        return made.from_host(site.module, config, site)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why a site cannot honour `config`: its capabilities, a learnable scale, or relative positions."""
        rescored = config.family or config["score"] != "standard" or config.option("scale")
        if rescored and learns_scale(getattr(site.module, "sdp_attn", None)):
            return f"lsa=True learns a scale for the standard score, which '{config}' replaces; build with lsa=False"
        if hasattr(site.module, "Er") and config.family:
            return f"ConvTran adds relative positions to the scores, and '{config}' has none"
        if hasattr(site.module, "relative_bias_table") and (
            config.family is None and config["grouping"] in ("kdgqa", "dgqa")
        ):
            return f"ConvTran's bias after the softmax belongs to heads in equal groups, which '{config}' does not keep"
        return refusal(config, site.capabilities)

    def install(self) -> None:
        """Make tsai's architectures accept `attention=` or refuse it by name, and its loaders compare it.

        Raises:
            PluginError: tsai is not installed or of a version that this plugin does not support.
        """
        require_host(self.name)
        from fastai.learner import Learner
        from tsai import learner, tslearner
        from tsai.models import utils

        importlib.import_module("tsai.callback.MVP")  # it has a copy of transfer_weights
        for name in dict.fromkeys(learner.all_arch_names):
            try:
                architecture = learner.get_arch(name)
            except ImportError:  # the architecture needs another package, which is missing
                continue
            if isinstance(architecture, type):  # scikit-learn pipelines among them
                self.patches.wrap(architecture, "__init__", accept(architecture, self))
        for kind in (tslearner.TSClassifier, tslearner.TSRegressor, tslearner.TSForecaster):
            self.patches.wrap(kind, "__init__", read_early)
        self.patches.wrap(Learner, "load", check_load)
        self._wrap_copies(learner, "ts_learner", read_early)
        self._wrap_copies(utils, "transfer_weights", check_transfer)

    def uninstall(self) -> None:
        """Undo `install`, also in modules that have imported a wrapped function since."""
        for owner, name, original in list(self.patches):
            for module in _holders(name, getattr(owner, name)) if isinstance(owner, ModuleType) else ():
                setattr(module, name, original)
        super().uninstall()

    def _wrap_copies(self, owner: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap a function in `owner` and in every module that has imported it by name, a notebook among them."""
        self.patches.wrap(owner, name, make)
        ours = getattr(owner, name)
        for module in _holders(name, ours.__wrapped__):
            self.patches.put(module, name, ours)


def _holders(name: str, value: Any) -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is value]


def _replacement(module: nn.Module) -> type[Replacement] | None:
    if isinstance(module, Replacement):
        return type(module)
    return HOSTS.get((type(module).__module__, type(module).__name__))


def _site(path: str, module: Any, made: type[Replacement], parent: nn.Module | None) -> Site:
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
    return Site(path, module, heads, width // heads, asked)
