"""FairseqAdapter: where fairseq's attention is, and what it asks of a mechanism."""

import functools
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quest_core.checkpoints import compare
from quest_core.config import AttentionConfig
from quest_core.drafts import host_class
from quest_core.hosts.adapter import Adapter, HostAttention, Site
from quest_core.hosts.inject import REPORT, inject

from . import models, patches
from .attention import Attention
from .config import PARTS, Asked, refuse_missing
from .transformer_xl import RelativeAttention


class FairseqAdapter(Adapter):
    """Every MultiheadAttention of fairseq: decoders (causal, with incremental state), encoders, cross-attention.

    Args:
        done: modules that have their attention already, and keep it.
    """

    name: ClassVar[str] = "fairseq"

    replacements: ClassVar = {"fairseq.modules.multihead_attention.MultiheadAttention": Attention}

    def __init__(self, done: Iterable[nn.Module] = ()) -> None:
        self.done = frozenset(done)

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module. That of transformers' TransfoXL moved between modules."""
        relative = host_class(module).__name__ == "RelPartialLearnableMultiHeadAttn"
        return RelativeAttention if relative else super().replacement(module)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft of a module, and one of `done` as it is."""
        return site.module if site.module in self.done else super().replace(site, config)

    def change_host(self) -> None:
        """Register a model ``quest_...`` for each model of fairseq, and its presets; change fairseq."""
        self.patches.once("models", functools.partial(models.register, inject_asked), models.unregister)
        patches.install(self.patches)
        # fairseq-train gives the file of --log-file only to this logger.
        self.forward_notices(lambda: logging.getLogger("fairseq_cli.train"))


def _part(site: Site) -> str:
    asked = site.capabilities
    return "cross" if asked.cross else "decoder" if asked.causal else "encoder"


def inject_asked(asked: Asked, model: nn.Module, *, fresh: bool = True, part: bool = False) -> None:
    """Put into a model that fairseq has just built what its options ask for, and report it.

    fairseq loads a pretrained encoder or decoder while it builds a model. Such a part gets its attention before
    (`load_part`), so that the checkpoint is compared with it; then the whole model gets the rest.

    Args:
        model: its loaded parts may have their attention already.
        fresh: fairseq has loaded nothing into the model but these parts.
        part: `model` is one of them, and is not loaded yet.
    """
    sites = [*FairseqAdapter().sites(model)]
    if part and not sites:  # LSTMs, convolutions
        return
    found = {_part(site) for site in sites}
    if not part:
        refuse_missing(asked, found, type(model).__name__)
    held = {site.module: _fits(site, asked) for site in sites if hasattr(site.module, "mechanism")}
    done = [module for module, fits in held.items() if fits]
    fresh = fresh or (bool(held) and len(done) == len(held))  # the loaded parts keep their attention
    groups: dict[AttentionConfig, list[str]] = {}
    for name in PARTS:
        if name in found or not found:
            groups.setdefault(asked.of[name], []).append(name)
    if not fresh and not held:  # stock weights were loaded in another way
        for config, parts in groups.items():
            compare(None, config, asked.trained, " and ".join(parts), model)
    options: dict[str, Any] = {"attention_from": asked.trained, "allow_partial": asked.allow_partial, "fresh": fresh}
    _, report = inject(model, lambda site: asked.of[_part(site)], adapter=FairseqAdapter(done), **options)
    if len(groups) > 1:
        kinds = "; ".join(f"{' and '.join(parts)}: {config}" for config, parts in groups.items())
        report = vars(model)[REPORT] = replace(report, attention=kinds)
    if not part:
        report.announce()


def _fits(site: Site, asked: Asked) -> bool:
    """Return whether a site has the attention that is asked for; raises CheckpointError as a checkpoint of it would."""
    mechanism: Any = site.module.mechanism
    return compare(mechanism.attention_is_not_standard, asked.of[_part(site)], asked.trained, site.path, site)
