"""FairseqAdapter: where fairseq's attention is, and what it asks of a mechanism."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from torch import nn

from quest_core.drafts import host_class
from quest_core.errors import ConfigError
from quest_core.hosts.adapter import Adapter, Capabilities, HostAttention, Site
from quest_core.hosts.inject import REPORT, Report, inject

from . import models, patches
from .attention import Attention
from .config import PARTS, Asked
from .transformer_xl import RelativeAttention


class FairseqAdapter(Adapter):
    """Every MultiheadAttention of fairseq: decoders (causal, with incremental state), encoders, cross-attention.

    Args:
        parts: whose sites are meant, of `PARTS`.
    """

    name: ClassVar[str] = "fairseq"
    capabilities: ClassVar[Capabilities] = Capabilities(causal=True, cached=True)

    replacements: ClassVar = {"fairseq.modules.multihead_attention.MultiheadAttention": Attention}

    def __init__(self, parts: Iterable[str] = PARTS) -> None:
        self.parts = frozenset(parts)
        if self.parts != {*PARTS}:
            self.leaves_alone = frozenset({"MultiheadAttention", "Attention"})  # type: ignore[misc]

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module. That of transformers' TransfoXL moved between modules."""
        relative = host_class(module).__name__ == "RelPartialLearnableMultiHeadAttn"
        return RelativeAttention if relative else super().replacement(module)

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield the sites of `parts`."""
        return (site for site in super().sites(model) if _part(site) in self.parts)

    def change_host(self) -> None:
        """Register a model ``quest_...`` for each model of fairseq, and its presets; change fairseq."""
        self.patches.once("models", functools.partial(models.register, put), models.unregister)
        patches.install(self.patches)
        # fairseq-train gives the file of --log-file only to this logger.
        self.forward_notices(lambda: logging.getLogger("fairseq_cli.train"))


def _part(site: Site) -> str:
    asked = site.capabilities
    return "cross" if asked.cross else "decoder" if asked.causal else "encoder"


def put(asked: Asked, model: nn.Module) -> None:
    """Put into a model that fairseq has just built what its options ask for, and report it.

    Raises:
        ConfigError: an option names a part that the model does not have.
        UnsupportedError, InjectionError: as `inject`.
    """
    found = {_part(site) for site in FairseqAdapter().sites(model)}
    for part in asked.named:
        if part not in found:
            has = " and ".join(sorted(found)) or "no"
            raise ConfigError(
                f"--attention-{part} (yaml: attention_{part}) is given, and {type(model).__name__} has {has} "
                "attention; leave the option out"
            )
    groups: dict[object, list[str]] = {}
    for part in PARTS:
        if part in found or not found:
            groups.setdefault(asked.of[part], []).append(part)
    options = {"fresh": True, "attention_from": asked.trained, "allow_partial": asked.allow_partial}
    reports: list[Report] = []
    for config, parts in groups.items():
        adapter = FairseqAdapter(parts if len(groups) > 1 else PARTS)
        reports.append(inject(model, config, adapter=adapter, **options)[1])  # type: ignore[arg-type]
    if len(reports) > 1:
        said = "; ".join(f"{' and '.join(parts)}: {config}" for config, parts in groups.items())
        rows = tuple(row for report in reports for row in report.replacements)
        left = tuple(path for path in reports[0].left_alone if all(path in report.left_alone for report in reports))
        vars(model)[REPORT] = replace(reports[0], attention=said, replacements=rows, left_alone=left)
    vars(model)[REPORT].announce()
