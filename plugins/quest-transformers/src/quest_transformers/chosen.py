"""Put a chosen attention into each module of a model: the one of its config, or of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter, Site
from quest_core.hosts.inject import REPORT, inject
from quest_core.hosts.plugins import running_adapters
from quest_core.hosts.sites import unknown_attention
from quest_core.hosts.torch import TorchAdapter
from quest_core.projections import Projected

from .anatomy import is_attention, role
from .choice import Choice
from .configs import attention_of, choice_for, choice_of
from .examples import Example


class Chosen(Adapter):
    """Some of the sites of an adapter with an attention each, which overrides that of inject.

    Args:
        chosen: the attention of each path; other sites are left out.
        leaves_alone: see :class:`quest_core.Adapter`.
        scales: whether the modules that it replaces have just been initialized, so that their options set the norms of
            queries and keys. Others keep the weights that they have, or will be given by a checkpoint.
    """

    name: ClassVar[str] = "transformers"
    kernels_attend: ClassVar[bool] = False  # those of state-space mixers do not

    def __init__(
        self,
        adapter: Adapter,
        chosen: Mapping[str, AttentionConfig],
        leaves_alone: Mapping[str, str],
        *,
        scales: bool = False,
    ) -> None:
        self.adapter, self.chosen, self.scales = adapter, chosen, scales
        self.leaves_alone = leaves_alone  # type: ignore[misc]
        self.new: list[nn.Module] = []  # replacements of a host's own modules

    def sites(self, model: nn.Module) -> Iterable[Site]:
        return (site for site in self.adapter.sites(model) if site.path in self.chosen)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        made = self.adapter.replace(site, self.chosen[site.path])
        if self.scales and made is not site.module:
            self.new.append(made)
        return made

    def kernel(self, site: Site, made: nn.Module) -> str:
        return self.adapter.kernel(site, made)

    def projections(self, module: nn.Module) -> list[Projected]:
        views = self.adapter.projections(module)
        for view in views:
            if not any(module is made for made in self.new):
                view.config = view.config.without_initial_norms()
        return views

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        asked = config in self.chosen.values()  # else inject looks for those that are possible
        return self.adapter.refusal(site, self.chosen[site.path] if asked else config)

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:
        self.adapter.connect(model, drafts)


def fulfil(
    adapter: Adapter,
    model: nn.Module,
    *,
    fresh: bool,
    loads: bool = False,
    choice: Choice | None = None,
    parts: Mapping[str, Choice] | None = None,
    runs: bool = True,
    example: Any = None,
    **options: Any,
) -> bool:
    """Put into a model what its configs ask for; return whether a module was replaced. Raises as quest_core.inject.

    Args:
        model: a PreTrainedModel; parts of it may have been built, and replaced, before.
        loads: they will be overwritten by those of a checkpoint, so none is scaled.
        choice: what to put instead of what the configs ask for.
        parts: the same for the attention modules with these paths.
        runs: run the model on inputs of the plugin's own if adapters do not know all of its attention. Without it, only
            what adapters know is replaced.
        example: inputs of the caller's for that run.
        options: `attention_from` and `allow_partial` of quest_core.inject.
    """
    asked = choice or choice_of(model.config)
    if asked is None and not parts and not any(_asks(part) for part in model.modules()):
        return False  # and a model of which nothing is asked is not looked at
    chosen: dict[str, AttentionConfig] = {}
    kept: list[str] = []
    changed = False
    for site in adapter.sites(model):
        module: Any = site.module
        held: Any = getattr(module, "mechanism", None)
        own = choice or (parts or {}).get(site.path) or (choice_for(model, module) if held is None else None)
        if own is None and held is None:
            kept.append(site.path)
            continue
        chosen[site.path] = held.config if own is None else own.of(role(module))
        changed = changed or held is None or held.config != chosen[site.path]
    others: list[Adapter] = []
    if asked is not None:
        others = [one for one in running_adapters() if not isinstance(one, type(adapter))] + [TorchAdapter()]
    known = [*chosen, *kept, *(site.path for one in others for site in one.sites(model))]
    unknown = () if asked is None else unknown_attention(model, known)
    if asked is not None and example is not None and runs:
        options["example"] = example
    elif asked is not None and (unknown or not known) and runs:
        try:
            options["example"] = Example(model, unknown)
        except InjectionError:
            if not options.get("allow_partial"):
                raise
    elif unknown:
        options["allow_partial"] = True
    if not known and "example" not in options:
        return False
    if chosen or asked is not None:
        # Unless the whole model asks for another, modules whose own config asks for nothing keep the host's attention,
        # and those that a part of it has replaced, through another adapter, keep theirs.
        apart: dict[str, str] = {}
        if asked is None:
            apart = {_kind(part): "its own config asks for nothing" for path in kept for part in _along(model, path)}
            done = (part for part in model.modules() if hasattr(part, "mechanism") and not is_attention(part))
            apart |= {_kind(part): "it was replaced before" for part in done}
        configs = sorted({*chosen.values()} or ({asked.decoder} if asked is not None else set()), key=str)
        if len(configs) > 1 and len(known) > len(chosen) + len(kept):
            raise UnsupportedError(
                f"{type(model).__name__} has attention that belongs to no role, so it takes one attention, not "
                f"{', '.join(map(str, configs))}"
            )
        # inject links layers if its own argument is chained, and refuses one with a start for trained weights.
        main = max(configs, key=lambda config: (not fresh and bool(config.initial_norms), _is_chain(config)))
        some = Chosen(adapter, chosen, apart, scales=fresh and not loads)
        before = {id(part) for part in model.modules()}
        _, report = inject(model, main, adapter=[some, *others], fresh=fresh, **options)
        scaled = fresh and any(config.initial_norms for config in configs)
        setattr(model, REPORT, replace(report, attention=", ".join(map(str, configs)), started=scaled))
        changed = changed or before != {id(part) for part in model.modules()}
    return changed


def _is_chain(config: AttentionConfig) -> bool:
    return any(part.chained for part in config.components)


def _along(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way to a path, and the one there."""
    names = path.split(".")
    return [model.get_submodule(".".join(names[: i + 1])) for i in range(len(names))]


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _asks(part: Any) -> bool:
    """Whether a module is an attention of quest, or its config asks for one."""
    return is_attention(part) and (hasattr(part, "mechanism") or attention_of(part.config) is not None)
