"""FairseqAdapter: where fairseq's attention is, and what it asks of a mechanism."""

from __future__ import annotations

import logging
from typing import ClassVar

from torch import nn

from quest_core.drafts import host_class
from quest_core.hosts.adapter import Adapter, Capabilities, HostAttention

from . import models, patches
from .attention import Attention
from .transformer_xl import RelativeAttention


class FairseqAdapter(Adapter):
    """Every MultiheadAttention of fairseq: decoders (causal, with incremental state), encoders, cross-attention."""

    name: ClassVar[str] = "fairseq"
    capabilities: ClassVar[Capabilities] = Capabilities(causal=True, cached=True)

    replacements: ClassVar = {"fairseq.modules.multihead_attention.MultiheadAttention": Attention}

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module. That of transformers' TransfoXL moved between modules."""
        relative = host_class(module).__name__ == "RelPartialLearnableMultiHeadAttn"
        return RelativeAttention if relative else super().replacement(module)

    def change_host(self) -> None:
        """Register quest_transformer_lm, quest_transformer, quest_transformer_xl and their presets; change fairseq."""
        self.patches.once("models", models.register, models.unregister)
        patches.install(self.patches)
        # fairseq-train gives the file of --log-file only to this logger.
        self.forward_notices(lambda: logging.getLogger("fairseq_cli.train"))
