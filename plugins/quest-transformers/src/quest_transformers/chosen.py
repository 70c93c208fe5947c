"""Put a chosen attention into each module of a model: the one of its config, or of a call."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import InjectionError, UnsupportedError
from quest_core.hosts.adapter import Adapter
from quest_core.hosts.inject import REPORT, inject
from quest_core.hosts.plugins import running_adapters
from quest_core.hosts.sites import unknown_attention
from quest_core.hosts.torch import TorchAdapter

from .anatomy import is_attention, role
from .choice import Choice
from .configs import attention_of, choice_for, choice_of


def inject_chosen(
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
        loads: the weights will be overwritten by those of a checkpoint, so none is scaled.
        choice: what to put instead of what the configs ask for.
        parts: the same for the attention modules with these paths.
        runs: run the model if adapters do not list all of its attention. Without it, only what they list is replaced.
        example: inputs for that run; by default the plugin's own.
        options: `attention_from` and `allow_partial` of quest_core.inject.
    """
    asked = choice or choice_of(model.config)  # of the whole model
    if asked is None and not parts and not any(_asks(part) for part in model.modules()):
        return False  # and a model of which nothing is asked is not looked at
    chosen = {
        site.path: _attention_for(model, site.module, choice or (parts or {}).get(site.path))
        for site in adapter.sites(model)
    }
    others: list[Adapter] = []
    if asked is not None:
        others = [one for one in running_adapters() if not isinstance(one, type(adapter))] + [TorchAdapter()]
    known = [*chosen, *(site.path for one in others for site in one.sites(model))]
    runs = runs and asked is not None
    if asked is not None and not runs and unknown_attention(model, known):
        options["allow_partial"] = True
    configs = sorted({one for one in chosen.values() if one is not None}, key=str)
    if not configs and asked is not None and (known or runs):
        configs = [asked.decoder]
    if not configs:
        return False
    if len(configs) > 1 and len(known) > len(chosen):
        raise UnsupportedError(
            f"{type(model).__name__} has attention that belongs to no role, so it takes one attention, not "
            f"{', '.join(map(str, configs))}"
        )
    kept = [path for path, config in chosen.items() if config is None]
    if asked is not None and kept and not options.get("allow_partial"):
        raise InjectionError(
            f"attention '{configs[0]}' was asked of {type(model).__name__}, and the configs of {len(kept)} modules "
            f"ask for none: {', '.join(kept[:8])}; give these configs an attention ('standard' is the host's own), "
            "or say allow_partial=True"
        )
    # What a part of a model has replaced, through another adapter, keeps that unless the whole model asks.
    done = (part for part in model.modules() if hasattr(part, "mechanism") and not is_attention(part))
    apart = {type(part).__name__: "it was replaced before" for part in (done if asked is None else ())}
    some = copy.copy(adapter)
    # Kernels of state-space mixers do not attend.
    vars(some).update(leaves_alone={**adapter.leaves_alone, **apart}, kernels_attend=False, scales=fresh and not loads)
    before = {*model.modules()}
    _, report = inject(
        model,
        lambda site: chosen.get(site.path, configs[0]),
        adapter=[some, *others],
        fresh=fresh,
        example=example if runs else False,
        **options,
    )
    scaled = fresh and any(config.initial_norms for config in configs)
    setattr(model, REPORT, replace(report, started=scaled))
    return before != {*model.modules()}


def _attention_for(model: Any, module: Any, choice: Choice | None) -> AttentionConfig | None:
    """Return the attention that a module shall have: that of `choice`, else the one that it has, else that of a config.

    None is the host's own.
    """
    held = getattr(module, "mechanism", None)
    if choice is None and held is not None:
        return held.config  # type: ignore[no-any-return]
    choice = choice or choice_for(model, module)
    return None if choice is None else choice.of(role(module))


def _asks(part: Any) -> bool:
    """Whether a module is an attention of quest, or its config asks for one."""
    return is_attention(part) and (hasattr(part, "mechanism") or attention_of(part.config) is not None)
