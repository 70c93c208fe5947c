"""TsaiAdapter: where tsai's attention is, and how `attention=` reaches it.

tsai copies names between its modules (``from x import *``), so a function has many copies, while a class is one object
everywhere. `change_host` therefore wraps methods of classes where it can. A notebook may import tsai first.
"""

import functools
import importlib
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Adapter, Site

from .layers import (
    ConvTranAttention,
    MultiheadAttention,
    PerceiverAttention,
    Replacement,
    TabularAttention,
    UnmaskedAttention,
)
from .surfaces import build_with_attention, check_early, init_again, leave_out_scores, transfer

REPLACEMENTS: dict[str, type[Replacement]] = {
    "tsai.models.layers.MultiheadAttention": MultiheadAttention,
    "tsai.models.PatchTST._MultiheadAttention": MultiheadAttention,
    "tsai.models.TST._MultiHeadAttention": UnmaskedAttention,
    "tsai.models.RNNAttention._MultiHeadAttention": UnmaskedAttention,
    "tsai.models.RNNAttentionPlus._MultiHeadAttention": UnmaskedAttention,
    "tsai.models.TabTransformer._MultiheadAttention": TabularAttention,
    "tsai.models.TabFusionTransformer._MultiheadAttention": TabularAttention,
    "tsai.models.TSPerceiver.Attention": PerceiverAttention,
    "tsai.models.ConvTranPlus.Attention": ConvTranAttention,
    "tsai.models.ConvTranPlus.Attention_Rel_Scl": ConvTranAttention,
    "tsai.models.ConvTranPlus.Attention_Rel_Vec": ConvTranAttention,
}
"""Host class -> its replacement."""


class TsaiAdapter(Adapter):
    """Adapter for tsai's own attention classes."""

    name: ClassVar[str] = "tsai"

    replacements = REPLACEMENTS

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft of the host's module around another mechanism; see quest_tsai.layers."""
        made: Any = super().replace(site, config)
        made.reads_weights = site.capabilities.weights
        return made  # type: ignore[no-any-return]

    def change_host(self) -> None:
        """Make tsai's architectures accept `attention=` or refuse it by name, and functions for weights honor it."""
        from fastai.callback import hook
        from tsai import learner, tslearner
        from tsai.models import utils

        importlib.import_module("tsai.callback.MVP")  # it has a copy of transfer_weights
        for name in dict.fromkeys(learner.all_arch_names):
            try:
                architecture = learner.get_arch(name)
            except ImportError:  # the architecture needs another package, which is missing
                continue
            if isinstance(architecture, type):  # scikit-learn pipelines among them
                change = functools.partial(build_with_attention, architecture, self)
                self.patches.around(architecture, "__init__", change)
        for kind in (tslearner.TSClassifier, tslearner.TSRegressor, tslearner.TSForecaster):
            self.patches.around(kind, "__init__", check_early)
        self.patches.around(learner, "ts_learner", check_early, everywhere=True)
        self.patches.around(utils, "transfer_weights", transfer, everywhere=True)
        self.patches.around(utils, "apply_init", init_again, everywhere=True)
        self.patches.around(hook, "flatten_model", leave_out_scores)
