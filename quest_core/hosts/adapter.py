"""The contract that a plugin implements: where a host's attention is, and how to replace it.

A plugin ships one :class:`Adapter`. Everything that is the same for all hosts (refusals, random state, atomic
replacement, the report, checkpoints) lives in :mod:`quest_core.hosts.inject`, so an adapter stays small.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from ..config import AttentionConfig
from ..errors import InjectionError, UnsupportedError
from ..notices import LOGGER, Forward
from ..projections import Projected
from ..registry import list_mechanisms
from .patching import Patches


@dataclass(frozen=True)
class Capabilities:
    """What a host (or one site of it) offers and asks of a mechanism.

    Attributes:
        ordered: tokens have an order; False for sets and graphs.
        causal: the host attends causally.
        cross: queries and keys come from different sequences.
        cached: the host decodes incrementally.
        weights: the host reads the attention weights or passes logits on.
        regroups: the host's key/value projections may have fewer heads than the queries.
        dropout: the host drops attention weights in training.
        narrows_keys: the host's key projection may have another width than the query's (aft-conv needs that).
        rotary: the host turns queries and keys by their positions.
    """

    ordered: bool = True
    causal: bool = False
    cross: bool = False
    cached: bool = False
    weights: bool = False
    regroups: bool = True
    dropout: bool = False
    narrows_keys: bool = False
    rotary: bool = False


@dataclass(frozen=True)
class Site:
    """One attention module of a host model.

    Attributes:
        path: dotted path inside the model ("" for the model itself).
        module: the module that `Adapter.replace` will be given.
        num_heads: query heads.
        head_dim: features per query/key head.
        capabilities: what this site asks of a mechanism.
        fresh: the weights have only been initialized, not trained; set by `inject`. Where a mechanism needs fewer key
            heads, `quest_core.projections.pool_heads` keeps one of each group of fresh heads and averages trained ones.
        stack: the stack of layers it belongs to, where paths that differ only in numbers do not say it: what
            compares a layer with the one before (elliptical) does so within a stack.
    """

    path: str
    module: nn.Module
    num_heads: int
    head_dim: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    fresh: bool = False
    stack: str | None = None


class Adapter(ABC):
    """The answers of a plugin about its host."""

    name: ClassVar[str]
    """The host's name, as in ``quest-<name>``."""
    capabilities: ClassVar[Capabilities]
    """What the host's easiest site offers and asks; single sites may offer less and ask more."""

    @abstractmethod
    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every attention module of this host in `model`, in the order of the forward pass.

        The module that an earlier injection put in place is a site again.
        """

    @abstractmethod
    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return a module that takes the host's calls of `site.module` and has another mechanism.

        It keeps the host's parameter objects, names and shapes where the mechanism has no parameters of its own;
        it does not touch the model (the caller swaps it in). Random numbers may be drawn freely.
        """

    leaves_alone: ClassVar[frozenset[str]] = frozenset()
    """Class names of attention modules of this host that stay as they are by design, such as deformable attention in a
    pixel decoder. They are reported; any other that stays is an error, unless `inject` gets `allow_partial`."""
    patches: ClassVar[Patches]
    """What `install` has changed in the host; every adapter class has its own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.patches = Patches()

    def install(self) -> None:
        """Make the host's own config system accept `attention`. Idempotent; runs before any model is built."""
        try:
            self.change_host()
        except BaseException:
            self.patches.undo()
            raise

    def change_host(self) -> None:  # noqa: B027
        """Make the changes of `install` through `patches`; by default none, because models are injected one by one."""

    def uninstall(self) -> None:
        """Undo `install`: the host is as it was before."""
        self.patches.undo()

    def forward_notices(self, logger: Callable[[], logging.Logger]) -> None:
        """Write the notices of quest_core to the handlers of the host's own logger too, until `uninstall`.

        Args:
            logger: called for every record, because hosts make their logger late and once for each run.
        """
        handler = Forward(logger)
        LOGGER.setLevel(logging.INFO)
        add, remove = (functools.partial(change, handler) for change in (LOGGER.addHandler, LOGGER.removeHandler))
        self.patches.once("notices", add, remove)

    def connect(self, model: nn.Module) -> None:  # noqa: B027
        """Give the replacements what they need from the model around them; called once all of them are in place.

        For example the grid of patches that the tokens came from. By default nothing.
        """

    def projected(self, module: nn.Module) -> list[Projected]:
        """Return the parts of a replacement that describe their projections.

        Override it for replacements that keep the host's class: return `Projected` views of their parameters.

        Args:
            module: as `replace` made it.
        """
        return [part for part in module.modules() if isinstance(part, Projected)]

    def scale_queries(self, module: nn.Module, factor: Tensor) -> None:
        """Multiply each head's query projection, bias included, in place: what `quest_core.calibrate` needs.

        Override it for queries that `quest_core.projections` cannot describe.

        Args:
            module: as `replace` made it; it is or contains one `Projected`.
            factor: [H], float64 on the CPU.

        Raises:
            UnsupportedError: the module is or contains no `Projected`, or its weight is made from others.
        """
        found = self.projected(module)
        if len(found) != 1:
            raise UnsupportedError(
                f"{type(module).__name__} of the adapter '{self.name}' has {len(found)} parts with `projections`, not "
                "one; inherit quest_core.projections.Projected, or inject and fine-tune without calibration"
            )
        found[0].projections.scale(found[0], found[0].head_sizes, "q", factor)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why this host cannot honour `config` at `site`, or None; override it for reasons of the host."""
        return refusal(config, site.capabilities)


def refusal(config: AttentionConfig, asked: Capabilities) -> str | None:
    """Return why a mechanism cannot give what a site asks for, or None if it can."""
    for part in config.components:
        for needs, gives, why in (
            (asked.causal, part.causal, f"it cannot be causal ({part.causal_reason})"),
            (asked.cross, part.cross, "it cannot attend across sequences"),
            (asked.cached, part.cached, "it cannot decode incrementally"),
            (asked.weights, part.axis != "family", "the host reads attention weights and it has none"),
            (asked.dropout, part.dropout, "it has no weights for the attention dropout, which would have to be 0"),
            (part.key_features is not None, asked.narrows_keys, "its keys are narrower than the host's"),
            ("order" in part.reads, asked.ordered, "it needs ordered tokens"),
            (asked.rotary, part.compares, "its queries do not meet keys, where rotary positions act"),
            (part.reshapes, asked.regroups, "the host's projections cannot change their shape"),
        ):
            if needs and not gives:
                return f"'{part.name}' is not possible here: {why}"
    return None


def require(adapter: Adapter, site: Site, config: AttentionConfig) -> None:
    """Raise UnsupportedError, naming what the site can honour, unless that is `config`; InjectionError if it cannot be
    replaced because its calls go to a function that is bound to it."""
    if any(vars(site.module).get(name) is not None for name in ("forward", "_compiled_call_impl")):
        raise InjectionError(
            f"'{site.path}' ({type(site.module).__name__}): its forward was replaced on the instance (by compile(), "
            "accelerate's device_map, ...), which would go on to call the host's attention; inject before that"
        )
    why = adapter.refusal(site, config)
    if why is None:
        return
    known = dict.fromkeys(
        str(AttentionConfig.parse(name)) for name in list_mechanisms()
    )  # softmax and mha are standard
    able = [name for name in known if adapter.refusal(site, AttentionConfig.parse(name)) is None]
    where = f" at '{site.path}'" if site.path else ""
    raise UnsupportedError(
        f"attention '{config}' cannot be used in {type(site.module).__name__}{where} of {adapter.name}: {why}"
        + (f". Possible here: {', '.join(able)}" if able else "")
    )
