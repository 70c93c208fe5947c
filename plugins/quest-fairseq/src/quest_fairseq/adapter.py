"""FairseqAdapter: where fairseq's attention is, and what it asks of a mechanism."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.checkpoints import compare
from quest_core.config import AttentionConfig
from quest_core.drafts import host_class
from quest_core.hosts.adapter import Adapter, HostAttention, Site
from quest_core.hosts.inject import REPORT, Report, inject

from . import models, patches
from .attention import Attention
from .config import PARTS, Asked, refuse_missing
from .transformer_xl import RelativeAttention


class FairseqAdapter(Adapter):
    """Every MultiheadAttention of fairseq: decoders (causal, with incremental state), encoders, cross-attention.

    Args:
        parts: whose sites are meant, of `PARTS`.
        done: modules that have their attention already, and are left out.
    """

    name: ClassVar[str] = "fairseq"

    replacements: ClassVar = {"fairseq.modules.multihead_attention.MultiheadAttention": Attention}

    def __init__(self, parts: Iterable[str] = PARTS, done: Iterable[nn.Module] = ()) -> None:
        self.parts, self.done = frozenset(parts), frozenset(done)
        if self.parts != {*PARTS} or self.done:
            self.leaves_alone = dict.fromkeys(("MultiheadAttention", "Attention"), "")  # type: ignore[misc]

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module. That of transformers' TransfoXL moved between modules."""
        relative = host_class(module).__name__ == "RelPartialLearnableMultiHeadAttn"
        return RelativeAttention if relative else super().replacement(module)

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the sites of `parts`."""
        return (site for site in super().sites(model) if _part(site) in self.parts and site.module not in self.done)

    def change_host(self) -> None:
        """Register a model ``quest_...`` for each model of fairseq, and its presets; change fairseq."""
        self.patches.once("models", functools.partial(models.register, put), models.unregister)
        patches.install(self.patches)
        # fairseq-train gives the file of --log-file only to this logger.
        self.forward_notices(lambda: logging.getLogger("fairseq_cli.train"))


def _part(site: Site) -> str:
    asked = site.capabilities
    return "cross" if asked.cross else "decoder" if asked.causal else "encoder"


def put(asked: Asked, model: nn.Module, *, fresh: bool = True, part: bool = False) -> None:
    """Put into a model that fairseq has just built what its options ask for, and report it.

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
    fresh = fresh or (bool(held) and len(done) == len(held))  # what was loaded is done
    groups: dict[AttentionConfig, list[str]] = {}
    for name in PARTS:
        if name in found or not found:
            groups.setdefault(asked.of[name], []).append(name)
    loaded = model.named_modules() if done else ()
    reports = [(path, vars(module)[REPORT]) for path, module in loaded if path and REPORT in vars(module)]
    for config, parts in groups.items():
        adapter = FairseqAdapter(parts if len(groups) > 1 else PARTS, done)
        if done and not [*adapter.sites(model)]:
            continue
        if not fresh and not held:
            compare(None, config, asked.trained, " and ".join(parts), model)
        options: dict[str, Any] = {"attention_from": asked.trained, "allow_partial": asked.allow_partial}
        reports.append(("", inject(model, config, adapter=adapter, fresh=fresh, **options)[1]))
    kinds = "; ".join(f"{' and '.join(parts)}: {config}" for config, parts in groups.items())
    vars(model)[REPORT] = Report.joined(kinds if len(groups) > 1 else str(next(iter(groups))), reports)
    if not part:
        vars(model)[REPORT].announce()


def _fits(site: Site, asked: Asked) -> bool:
    """Return whether a site has the attention that is asked for; raises CheckpointError as a checkpoint of it would."""
    mechanism: Any = site.module.mechanism
    return compare(mechanism.attention_is_not_standard, asked.of[_part(site)], asked.trained, site.path, site)
