"""TransformersAdapter: where the attention of a transformers model is, and how `attn_implementation` reaches it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.hosts.sites import looks_like_attention, within
from quest_core.mechanism import head_sizes
from quest_core.projections import Projected

from . import configs, surfaces
from .anatomy import Anatomy, examine, is_attention, is_rotary, regroups, takes_cache, unscalable
from .examples import Example
from .layers import OUR_FUNCTIONS, View, prepares, replace, unknown_keywords

_OWN = {
    "attn_logit_softcapping": "caps its logits, which is a part of its own softmax",
    "sinks": "has attention sinks, which are a part of its own softmax",
    "sink_proj": "has attention sinks, which are a part of its own softmax",
    "indexer": "chooses the keys of each query, and masks the others for its own functions only",
}
"""Attributes of attention modules that only the host's function honors, so they exclude others (not `prepares`)."""


class TransformersAdapter(Adapter):
    """Adapter for every module of transformers that calls its AttentionInterface."""

    name: ClassVar[str] = "transformers"
    leaves_alone: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (f"Inkling2{kind}AttentionResidual" for kind in ("Block", "LoopBlock", "LoopMessage")),
        "attention over layers, not tokens",
    )
    scales = True
    """Whether options set the norms of queries and keys; those of a checkpoint would overwrite them."""

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the attention modules in the order of registration, which is that of the forward pass.

        Those that do not say how many heads they have are left to the run of an example.
        """
        for path, module in model.named_modules():
            if not is_attention(module) or type(module).__name__ in self.leaves_alone:
                continue
            try:
                anatomy = examine(module)
            except UnsupportedError:
                if looks_like_attention(module):
                    continue  # inject misses it, and the run of an example finds it
                raise
            yield Site(path, module, anatomy.num_heads, anatomy.head_dim, _capabilities(anatomy, module))

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's module with a mechanism; a module that has this mechanism already is returned itself."""
        held = getattr(site.module, "mechanism", None)
        if held is not None and held.config == config:
            return site.module
        return replace(site.module, config, fresh=site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why a site cannot honor `config`: its capabilities, projections, key/value heads or masks."""
        why = refusal(config, site.capabilities)
        if why is not None:
            return why
        module: Any = site.module
        anatomy = examine(module)
        if not prepares(config):
            for name, what in _OWN.items():
                if getattr(module, name, None) is not None:
                    return f"the host {what} ({name})"
            if unknown := unknown_keywords(module):
                return f"the host hands {', '.join(unknown)} to its attention function, which this plugin does not know"
        if config.initial_norms and (fixed := unscalable(module)) is not None:
            return f"initial norms of queries and keys cannot be set: {fixed}"
        if config.family and anatomy.kv_heads != anatomy.num_heads:
            return (
                f"it needs a key/value head for each of the {anatomy.num_heads} query heads, and has {anatomy.kv_heads}"
            )
        holder = module if hasattr(module, "sliding_window") else module.config  # NeoMME's config raises
        if config.family and (window := getattr(holder, "sliding_window", None)) is not None:
            return f"it looks at all tokens, and the model has a sliding window of {window}"
        kinds = sorted(set(getattr(module.config, "layer_types", None) or ()))
        if len(kinds) > 1 and any(part.chained for part in config.components):
            return f"it compares the tokens of one layer with those of the next, and a cache holds others ({kinds})"
        try:
            wanted = head_sizes(config, anatomy.num_heads, anatomy.head_dim, host_kv_heads=anatomy.kv_heads).kv_heads
        except ConfigError:  # kv_heads is missing or does not divide the heads: an error of its own
            return None
        if anatomy.kv_heads % wanted:
            return f"its {anatomy.kv_heads} key/value heads cannot be reduced to {wanted}"
        return None

    def kernel(self, site: Site, made: Any) -> str:
        """Return the name of transformers' function, unless the mechanism takes its place."""
        name: str = made.config._attn_implementation
        return name if made.rules.prepares and name not in OUR_FUNCTIONS else super().kernel(site, made)

    def projections(self, module: nn.Module) -> list[Projected]:
        """Return a view of the module's parameters, because a replacement keeps its host's class."""
        if examine(module).projections is None:
            return []
        view = View.of(module)
        view.config = view.config if self.scales else view.config.without_initial_norms()
        return [view]

    def example(self, model: nn.Module, missed: Collection[str]) -> Example | None:
        """Return a run of the models of transformers around the modules `missed` on inputs of the plugin's own."""
        models = [path for path, part in model.named_modules() if isinstance(part, PreTrainedModel)]
        inside = [path for path in missed if within(path, models)]
        return Example(model, inside) if inside or "" in models else None

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        """Write the attention into the model's configs, in copies of those that have to change."""
        configs.write_configs(model, drafts)

    def disconnect(self, model: nn.Module) -> None:
        """Take the attention out of configs that a model was built from, in copies of them."""
        configs.forget(model)

    def scale_queries(self, module: nn.Module, factor: Tensor) -> None:
        """Scale the query projection; see `Adapter.scale_queries`.

        Raises:
            UnsupportedError: the queries are made in a way that is not known.
        """
        host: Any = module
        sizes, projections = host.head_sizes, examine(host).projections
        packed: Any = getattr(host, "q_attn", None) or getattr(host, "c_attn", None)
        why = unscalable(module)
        if why is not None and (projections is not None or type(packed).__name__ != "Conv1D"):
            raise UnsupportedError(
                f"the queries of {type(module).__name__} cannot be scaled: {why}; use quest_core.inject and fine-tune "
                "without calibration"
            )
        if projections is not None:
            projections.scale(host, sizes, "q", factor)
            return
        rows = factor.repeat_interleave(sizes.head_dim)  # [H·D]
        with torch.no_grad():
            for parameter in (packed.weight, packed.bias):  # [E, H·D ...] and [H·D ...]
                queries = parameter[..., : len(rows)]
                queries.copy_(queries.double() * rows.to(parameter.device))

    def change_host(self) -> None:
        """Make transformers accept `attn_implementation="quest"` and `config.attention`, and compare checkpoints."""
        surfaces.install(self, self.patches)


def _capabilities(anatomy: Anatomy, module: nn.Module) -> Capabilities:
    ordered = getattr(module, "is_decoder", False) or takes_cache(module)  # tokens of a decoder that attend across
    return Capabilities(
        causal=anatomy.role == "decoder" or (anatomy.role == "cross" and ordered),
        cross=anatomy.role == "cross",
        cached=anatomy.role == "decoder",
        dropout=anatomy.dropout > 0,
        regroups=anatomy.projections is not None and regroups(module),
        rotary=is_rotary(module),
    )
