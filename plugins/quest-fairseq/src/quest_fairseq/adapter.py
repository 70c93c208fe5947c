"""FairseqAdapter: where fairseq's attention is, and what it asks of a mechanism."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar

from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal

from . import models, patches
from .attention import Attention
from .transformer_xl import RelativeAttention

RELATIVE = "RelPartialLearnableMultiHeadAttn"
"""The attention of transformers' TransfoXL, by name: it moved between modules, and is not always installed."""

TRANSFORMER_XL = Capabilities(causal=True, weights=True, regroups=False)
"""It adds relative logits to the scores; one projection makes queries, keys and values."""


class FairseqAdapter(Adapter):
    """Every MultiheadAttention of fairseq: decoders (causal, with incremental state), encoders, cross-attention."""

    name: ClassVar[str] = "fairseq"
    capabilities: ClassVar[Capabilities] = Capabilities(causal=True, cached=True)

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every attention module in the order of registration, which is that of the forward pass."""
        parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        # Exact types, because a subclass may have a forward of its own.
        known = (MultiheadAttention, Attention, RelativeAttention)
        found = ((p, m) for p, m in model.named_modules() if type(m) in known or type(m).__name__ == RELATIVE)
        for path, module in found:
            if not isinstance(module, MultiheadAttention):
                yield Site(path, module, module.n_head, module.d_head, TRANSFORMER_XL)
                continue
            decodes = isinstance(parents.get(id(module)), TransformerDecoderLayerBase)
            cross = module.encoder_decoder_attention  # in a decoder of any kind, LightConv's for example
            asked = Capabilities(
                causal=decodes or cross,
                cached=decodes and not cross,
                cross=cross,
                dropout=module.dropout_module.p > 0,
            )
            yield Site(path, module, module.num_heads, module.head_dim, asked)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's own projections around another mechanism."""
        kind = RelativeAttention if site.capabilities == TRANSFORMER_XL else Attention
        return kind.adopt(site.module, config, num_heads=site.num_heads, head_dim=site.head_dim, fresh=site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Also refuse options of fairseq that need its own attention."""
        module, asked = site.module, site.capabilities
        if asked == TRANSFORMER_XL:
            if any(part.chained for part in config.components):
                return f"'{config.name}' changes queries by the values of tokens, and relative positions have no values"
            return refusal(config, asked)
        noisy = [name for name in ("q", "k", "v", "out") if getattr(module, f"{name}_proj")._forward_pre_hooks]
        for there, option in (
            (module.use_xformers, "xformers_att_config brings an attention of its own"),
            (module.bias_k is not None or module.add_zero_attn, "add_bias_kv and add_zero_attn are not supported"),
            (bool(noisy), "quant_noise hooks the projections, whose shapes and blocks belong to fairseq"),
            (not (module.self_attention or asked.cross), "cross_self_attention joins encoder and decoder tokens"),
        ):
            if there:
                return f"{option}; leave the option out"
        if asked.causal and asked.cross and any("order" in part.reads for part in config.components):
            return (
                f"'{config.name}' counts the positions of queries, and in cross-attention a decoder brings its queries "
                "one by one"
            )
        return refusal(config, asked)

    def connect(self, model: nn.Module) -> None:
        """Let encoder layers of fairseq 0.12.2 that have loaded a checkpoint call their attention in evaluation."""
        for layer in model.modules():
            if hasattr(layer, "load_to_BT"):
                vars(layer)["load_to_BT"] = False

    def change_host(self) -> None:
        """Register quest_transformer_lm, quest_transformer, quest_transformer_xl and their presets; change fairseq."""
        self.patches.once("models", models.register, models.unregister)
        patches.install(self.patches)
        # fairseq-train gives the file of --log-file only to this logger.
        self.forward_notices(lambda: logging.getLogger("fairseq_cli.train"))
