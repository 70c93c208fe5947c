"""inject: put another attention into a model that exists already, and say what was replaced."""

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from torch import nn

from ..checkpoints import HOOK, compare_before_loading, set_attention_from
from ..compat import same_random_state
from ..config import AttentionConfig, AttentionSpec
from ..drafts import FORMER, Former, assign, draft, host_class, is_draft, origin_of, restore
from ..errors import ConfigError, InjectionError, PluginError, UnsupportedError, check_flag
from ..mechanism import Mechanism, count_kv_heads, has_mechanism
from ..mechanisms.elliptical import chain, refuse_repeated, stack_of
from ..notices import say
from ..projections import Projected, init_norms, norm_factors
from .adapter import Adapter, Site, require
from .finding import Finding
from .plugins import adapter as find_adapter
from .plugins import plugins, running_adapters
from .sites import looks_like_attention, unknown_attention, within
from .torch import TorchAdapter

REPORT = "attention_report"
"""The attribute of an injected model that holds its Report."""
KEY_NORM = re.compile(r"q?k_?(layer_?)?norm|key_?(layer_?)?norm|norm_?(k|key)|ln_k|k_ln", re.IGNORECASE)
"""Names of the modules by which hosts normalize keys."""
NARROW = 8
"""Features of a head up to which reports have a remark on unit keys."""
NARROW_HEADS = (
    "on text, unit keys were worse than standard in heads of 4 features, and not significantly in heads of 8 "
    "(https://quest-attention.github.io/quest/results/widths/)"
)
"""What was measured of unit keys in narrow heads."""
GUIDE = "https://quest-attention.github.io/quest/writing-an-adapter/"
BY_EXAMPLE = "say inject(model, ..., example=batch), which finds calls of PyTorch's functions and written-out ones"


@dataclass(frozen=True)
class Replacement:
    """One replaced module: its path, its class, its parameters in the host and now, and what computes its attention."""

    path: str
    host_class: str
    adapter: str
    parameters_before: int  # of the host, without what an earlier injection has taken from its keys and values
    parameters_after: int
    kernel: str = ""
    note: str = ""  # a remark on the attention in this host
    query_norms: tuple[float, ...] = ()  # of a fresh model: see `Projections.norms`; one of each head
    attention: str = ""


@dataclass(frozen=True)
class Report:
    """What an injection did.

    Attributes:
        attention: the mechanisms, as AttentionConfig writes them.
        replacements: one entry per replaced module, in the order of the forward pass.
        left_alone: paths of modules that look like attention and that were not replaced -> why, "" if it is not known.
        started: whether options of the attention set the norms of queries or keys.
    """

    attention: str
    replacements: tuple[Replacement, ...]
    left_alone: Mapping[str, str] = field(default_factory=dict)
    started: bool = False

    def __str__(self) -> str:
        before = sum(r.parameters_before for r in self.replacements)
        after = sum(r.parameters_after for r in self.replacements)
        kinds = sorted({r.host_class for r in self.replacements})
        count = len(self.replacements)
        size = f"{before:,} parameters as before" if before == after else f"{before:,} -> {after:,} parameters"
        left: dict[str, list[str]] = {}
        for path, why in self.left_alone.items():
            left.setdefault(f" ({why})" if why else "", []).append(path)
        others = f"; kernel={' and '.join(dict.fromkeys(r.kernel for r in self.replacements))}"
        for why, paths in left.items():
            more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
            others += f"; not replaced{why}: {', '.join(paths[:8])}{more}"
        others += "".join(f"; {note}" for note in dict.fromkeys(r.note for r in self.replacements if r.note))
        norms = [norm for r in self.replacements for norm in r.query_norms]
        if norms and self.started:
            size += f"; queries start with norms {min(norms):.3g} to {max(norms):.3g}"
        return f"attention={self.attention} in {count} module{'s' * (count > 1)} ({', '.join(kinds)}; {size}){others}"

    def table(self) -> str:
        """Return all replaced modules, a line each below headings; ‖q‖ is the mean norm of queries in a fresh model."""
        rows = [["module", "attention", "class", "adapter", "parameters", "kernel", "‖q‖", "note"]]
        for r in self.replacements:
            norm = f"{sum(r.query_norms) / len(r.query_norms):.3g}" if r.query_norms else ""
            size = f"{r.parameters_before:,} -> {r.parameters_after:,}"
            rows.append([r.path, r.attention, r.host_class, r.adapter, size, r.kernel, norm, r.note])
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = zip(*columns, strict=True)
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def announce(self) -> None:
        """Write the report in one line to the host's log, as a plugin does when a host's config asked for it."""
        if not REHEARSES.get():
            say(str(self))


REHEARSES: ContextVar[bool] = ContextVar("REHEARSES", default=False)
"""Whether a model is built to be thrown away; see `request.rehearse`."""


def inject(
    model: nn.Module,
    attention: AttentionSpec | Callable[[Site], AttentionSpec | None],
    *,
    adapter: str | Adapter | Sequence[str | Adapter] | None = None,
    fresh: bool = False,
    attention_from: AttentionSpec | None = None,
    allow_partial: bool = False,
    example: Any = None,
) -> tuple[nn.Module, Report]:
    """Replace every attention of `model`, in place: the modules stay the same objects, and their classes change.

    Inject before the optimizer, EMA, DDP/FSDP and torch.compile, which would not see new parameters. The random state
    is left as it was. An error leaves the model as it was. `uninject` restores it.

    >>> model, report = quest_core.inject(model, "quest")

    Args:
        model: any model whose attention an adapter knows; torch.nn.MultiheadAttention always is known, and the hosts
            of installed plugins are while their framework is imported.
        attention: a name, mapping or AttentionConfig. Or a function that returns it for each module, by its `path` in
            the model and the other attributes of :class:`quest_core.Site`; None keeps the host's attention there.
        adapter: the name of a plugin, an Adapter, or several of these, to use instead of all that apply. Where two find
            the same module, the first one replaces it.
        fresh: the model has only been initialized. With fewer key/value heads (gqa), one head of each group stays, in
            place of the mean of trained ones. Options such as ``quest(init=5)`` need a fresh model.
        attention_from: the attention of the checkpoints that will be loaded, if that is another on
            purpose; without it `load_state_dict` raises CheckpointError, or warns of standard weights.
        allow_partial: leave modules that look like attention and that no adapter replaces; the report names them.
        example: inputs for one run of the model, which finds every module that no adapter replaces and that
            calls an attention function of PyTorch or writes its attention out: ``model(*example)`` for a tuple or list,
            ``model(**example)`` for a mapping, ``example(model)`` for a function, and ``model(example)`` for others.
            Models of transformers and timm mostly need none: their plugins make inputs where adapters miss attention.
            False runs nothing.

    Returns:
        The same model and the report, which the model also carries as ``model.attention_report``.

    Raises:
        ConfigError: unknown mechanism or option, one that sets the start of a model that is not fresh, or a flag that
            is not a bool.
        InjectionError: no attention was found, only a part of it is replaceable, the model is wrapped or observed, or
            keeps a method of an attention that the replacement does not have.
        UnsupportedError: a site cannot honor the mechanism; the message names those that it can.
        PluginError: the named plugin is missing or not ok.
    """
    check_flag("fresh", fresh)
    check_flag("allow_partial", allow_partial)
    choose = _chooser(attention, fresh=fresh)
    trained = None if attention_from is None else AttentionConfig.parse(attention_from)
    _refuse_wrapped(model)
    if adapter is None:
        adapters: list[Adapter] = [*running_adapters(), TorchAdapter()]
    else:
        named = [adapter] if isinstance(adapter, str | Adapter) else adapter
        adapters = [one if isinstance(one, Adapter) else find_adapter(one) for one in named]

    # Find all sites, and refuse what cannot be done.
    found = _choose_sites(model, adapters)
    finding = Finding(model, [site.path for _, site in found])
    by_design = {kind: why for owner in adapters for kind, why in owner.leaves_alone.items()}
    if example is None:
        ran = _run_own_examples(finding, adapters, by_design, named=adapter is not None, allow_partial=allow_partial)
    else:
        ran = example is not False
        if ran:
            finding.run(example, adapters, allow_partial=allow_partial)
    found = [(owner, site) for owner, site in found if site.path not in finding.idle]
    if ran or adapter is None:
        found += finding.sites(allow_partial=allow_partial)
    if not found:
        raise InjectionError(_nothing_found(model, adapters, finding, ran=ran))
    chosen, kept = _choose(found, choose, fresh=fresh)
    configs = sorted({site.attention for _, site in chosen}, key=str)
    said = ", ".join(map(str, configs))
    unreplaced = finding.missed | _unknown(model, adapters, by_design, [site.path for _, site in found])
    if not allow_partial:
        unexplained = {path: module for path, module in unreplaced.items() if path not in finding.left_alone}
        _refuse_partial(said, chosen, by_design, unexplained, ran=example is not None and ran)
    for owner, site in chosen:
        require(owner, site, site.attention)
    for config in configs:
        _refuse_heads(config, [site for _, site in chosen if site.attention == config])
    stacks = _stacks(model, [site for _, site in chosen], kept)

    # Draft all changes; the model is not changed yet.
    with same_random_state(model):
        made = [owner.replace(site, site.attention) for owner, site in chosen]
    for (owner, site), one in zip(chosen, made, strict=True):
        if origin_of(one) is not site.module:
            raise InjectionError(
                f"{type(owner).__name__}.replace returned another module than a draft of '{site.path}'; make it by "
                "HostAttention.adopt or quest_core.drafts.draft"
            )
        if _is_frozen_around(model, site):
            one.requires_grad_(False)
    _keep_ties([site.module for _, site in chosen], made)
    drafts: dict[nn.Module, Any] = {origin_of(one): one for one in made}
    for owner in adapters:  # also those that own no site: their hosts' configs may say the attention
        owner.connect(model, drafts)
    scaled = _projections_to_scale(chosen, made) if fresh else []
    rows = [_row(owner, site, one) for (owner, site), one in zip(chosen, made, strict=True)]
    whys = finding.left_alone
    left_alone = {path: by_design.get(type(m).__name__) or whys.get(path, "") for path, m in unreplaced.items()}
    left_alone |= {site.path: "no attention was chosen for it" for site in kept}
    report = Report(said, tuple(rows), left_alone, bool(scaled))
    changed = {origin_of(x): type(x) for one in drafts.values() for x in one.modules() if is_draft(x)}
    _refuse_kept_methods(model, changed)

    # Assign them, which cannot fail.
    for one in drafts.values():
        assign(one)
    for part in scaled:
        init_norms(part)
    if stacks:
        chain(model, stacks)
    if trained is not None:
        for _, site in chosen:
            set_attention_from(site.module, trained)
    compare_before_loading(model)
    vars(model)[REPORT] = report  # a model's own __setattr__ may refuse
    return model, report


def _chooser(
    attention: AttentionSpec | Callable[[Site], AttentionSpec | None], *, fresh: bool
) -> Callable[[Site], AttentionConfig | None]:
    """Return the function that chooses the attention of a site; ConfigError if that sets the start of a trained one."""

    def parse(spec: AttentionSpec) -> AttentionConfig:
        config = AttentionConfig.parse(spec)
        if config.initial_norms and not fresh:
            raise ConfigError(
                f"attention '{config}' scales projections that have only been initialized, and this model may be "
                "trained; say fresh=True if it is not, or leave the option out (quest_core.calibrate fits trained "
                "queries)"
            )
        return config

    if not callable(attention) or isinstance(attention, type):
        config = parse(attention)  # type: ignore[arg-type]  # of a class it says what to write
        return lambda _: config
    return lambda site: None if (spec := attention(site)) is None else parse(spec)


def _choose(
    found: Iterable[tuple[Adapter, Site]], choose: Callable[[Site], AttentionConfig | None], *, fresh: bool
) -> tuple[list[tuple[Adapter, Site]], list[Site]]:
    """Return the sites that get an attention, and those that keep the host's."""
    chosen: list[tuple[Adapter, Site]] = []
    kept: list[Site] = []
    for owner, site in found:
        site = replace(site, fresh=fresh)
        if (config := choose(site)) is None:
            kept.append(site)
        else:
            chosen.append((owner, replace(site, attention=config)))
    if not chosen:
        raise InjectionError(f"no attention was chosen for any of {', '.join(repr(site.path) for site in kept)}")
    if held := [site.path for site in kept if has_mechanism(site.module)]:
        raise InjectionError(
            f"no attention was chosen for '{held[0]}', which has one of quest_core; choose that again, or call uninject"
        )
    return chosen, kept


def uninject(model: nn.Module) -> nn.Module:
    """Restore the host's attention in a model that `inject` has changed, in place.

    The weights of the host stay as they are now, and parameters of the mechanism are lost.

    Returns:
        The same model.

    Raises:
        InjectionError: nothing was injected; projections were made smaller (groupings, aft-conv), and those of the host
            were not kept; they are parametrized (weight_norm) since; or a Monitor watches. The model is not changed.
    """
    changed: dict[nn.Module, Former] = {m: vars(m)[FORMER] for m in model.modules() if FORMER in vars(m)}
    if not changed:
        raise InjectionError(f"{type(model).__name__} has no attention that inject replaced, so nothing can be undone")
    if smaller := [path for path, m in model.named_modules() if m in changed and changed[m].reparametrized]:
        raise InjectionError(
            f"the projections of '{smaller[0]}' were made smaller, and those of the host were not kept; build the "
            "model again, and load its weights"
        )
    if parametrized := [m for m in changed if nn.utils.parametrize.is_parametrized(m)]:  # by a class of its own
        raise InjectionError(
            f"weights of a {type(parametrized[0]).__name__} were parametrized (weight_norm, ...) after inject; undo "
            "that first: torch.nn.utils.parametrize.remove_parametrizations"
        )
    _refuse_observed(model)
    _refuse_kept_methods(model, {module: former.kind for module, former in changed.items()})
    for module in changed:
        restore(module)
    for owner in running_adapters():
        owner.disconnect(model)
    hook = vars(model).pop(HOOK, None)
    if hook is not None:
        hook.remove()
    vars(model).pop(REPORT, None)
    return model


def _is_frozen_around(model: nn.Module, site: Site) -> bool:
    """Return whether a site has no parameters, and the nearest module around it that has some is frozen."""
    path, held = site.path, [*site.module.parameters()]
    if held:
        return False
    while path and not held:
        path = path.rpartition(".")[0]
        held = [*model.get_submodule(path).parameters()]
    return bool(held) and not any(p.requires_grad for p in held)


def _refuse_partial(
    said: str,
    chosen: Sequence[tuple[Adapter, Site]],
    by_design: Container[str],
    left: Mapping[str, nn.Module],
    *,
    ran: bool,
) -> None:
    """Raise InjectionError if modules would stay that are in no `Adapter.leaves_alone`."""
    missed = {path: type(module).__name__ for path, module in left.items() if type(module).__name__ not in by_design}
    if missed:
        shown = ", ".join(f"'{path}' ({kind})" for path, kind in list(missed.items())[:8])
        more = f" and {len(missed) - 8} more" if len(missed) > 8 else ""
        unknown = "which no adapter knows" + (" and in which the example showed none" if ran else "")
        raise InjectionError(
            f"attention '{said}' would replace {len(chosen)} modules and leave {len(missed)} as they are, which "
            f"look like attention and {unknown}: {shown}{more}; {'' if ran else BY_EXAMPLE + '; '}"
            f"say allow_partial=True if that is meant, or write an adapter for them ({GUIDE})"
        )


def _refuse_heads(config: AttentionConfig, sites: Iterable[Site]) -> None:
    """Raise ConfigError if a number of key/value heads does not fit every site; it says which does."""
    heads = sorted({site.num_heads for site in sites})
    for n in heads:
        try:
            count_kv_heads(config, n)
        except ConfigError as error:
            if len(heads) == 1:
                raise
            common = math.gcd(*heads)
            fitting = ", ".join(str(g) for g in range(1, common + 1) if common % g == 0)
            raise ConfigError(
                f"{error}. The model has layers of {', '.join(map(str, heads))} heads: all of them take "
                f"kv_heads={fitting} (a number) or ratio={fitting} (query heads per key/value head)"
            ) from None


def _stacks(model: nn.Module, sites: Iterable[Site], kept: Iterable[Site]) -> dict[str, str]:
    """Return the stack of each path whose attention compares layers, for `chain`; `kept` have the host's attention."""

    def stack(site: Site) -> str:
        return site.stack or stack_of(site.path)

    chained, others = list[Site](), [*kept]
    for site in sites:
        (chained if any(part.chained for part in site.attention.components) else others).append(site)
    if not chained:
        return {}
    stacks = {site.path: stack(site) for site in chained}
    if len(set(stacks.values())) == len(stacks):
        raise InjectionError(
            f"attention '{chained[0].attention}' compares each layer with the one before it, and here no layer follows "
            f"another: {', '.join(site.path or type(site.module).__name__ for site in chained)}. Layers follow each "
            "other where their paths differ in numbers only, as in layers.0.attn and layers.1.attn, and no stage ends "
            "between"
        )
    if mixed := [site for site in others if stack(site) in stacks.values()]:
        raise UnsupportedError(
            f"attention '{chained[0].attention}' compares each layer with the one before it, and '{mixed[0].path}' of "
            f"this stack has another attention; choose one for all of '{stack(mixed[0])}'"
        )
    refuse_repeated(model, [site.module for site in chained])
    return stacks


def _projections_to_scale(chosen: Iterable[tuple[Adapter, Site]], made: Iterable[nn.Module]) -> list[Projected]:
    """Return the projections that options of the attention scale; raises UnsupportedError if some cannot be scaled.

    A module that its adapter returns as it is had its attention before, and was scaled then.
    """
    found: list[Projected] = []
    for (owner, site), one in zip(chosen, made, strict=True):
        if one is site.module:
            continue
        projected = owner.projections(one)
        if site.attention.initial_norms and not projected:
            raise UnsupportedError(
                f"attention '{site.attention}' scales query and key projections, and {type(one).__name__} describes "
                "none (quest_core.projections.Projected); leave the option out"
            )
        found += [part for part in projected if part.config.initial_norms]
    for part in found:
        norm_factors(part)
    return found


def _row(owner: Adapter, site: Site, made: nn.Module) -> Replacement:
    """Return the entry of a report for the draft that `site.module` will become."""
    norms = _query_norms(owner.projections(made)) if site.fresh else ()
    before, after = (sum(p.numel() for p in one.parameters()) for one in (draft(site.module), made))
    note = site.note
    if not note and any(part.unit_keys for part in site.attention.components):
        note = _remark_on_norm(site)
        if not note and site.head_dim <= NARROW:
            note = f"heads have {site.head_dim} features; {NARROW_HEADS}"
    kind, said = host_class(site.module).__name__, str(site.attention)
    return Replacement(site.path, kind, owner.name, before, after, owner.kernel(site, made), note, norms, said)


def _remark_on_norm(site: Site) -> str:
    """Return what unit keys mean in a module with a norm of its own on keys; "" for other modules."""
    for path, norm in site.module.named_modules():
        name = path.rpartition(".")[2]
        if not KEY_NORM.fullmatch(name) or not re.search("norm", type(norm).__name__, re.IGNORECASE):
            continue
        weight = getattr(norm, "weight", None)
        if weight is None or weight.numel() == site.head_dim:
            said = f"the host's {name} gives keys one norm already, up to its weights"
            return f"{said}, so unit keys change at most the scale"
        return f"the host's {name} normalizes keys over all heads, and unit keys normalize those of each head after it"
    return ""


def _query_norms(parts: list[Projected]) -> tuple[float, ...]:
    """Return the expected query norm of each head after scaling; () if no projections are described or have values."""
    try:
        norms = [part.projections.norms(part, part.head_sizes, "q") for part in parts]
    except UnsupportedError:  # parametrized
        return ()
    if any(x.is_meta for x in norms):
        return ()
    asked = [part.config.initial_norms.get("q") for part in parts]
    return tuple(x if norm is None else float(norm) for norm, xs in zip(asked, norms, strict=True) for x in xs.tolist())


def _keep_ties(hosts: Iterable[nn.Module], made: Iterable[nn.Module]) -> None:
    """Make replacements share what took the place of one parameter that their hosts share."""
    shared: dict[Any, nn.Parameter] = {}
    for host, module in zip(hosts, made, strict=True):
        new = dict(module.named_parameters(remove_duplicate=False))
        for name, old in host.named_parameters(remove_duplicate=False):
            if name in new and new[name] is not old:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, shared.setdefault((id(old), new[name].shape), new[name]))


def _refuse_kept_methods(model: nn.Module, changed: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Raise InjectionError if a module keeps a method, as in ``self.attend = self.attn.forward``, that would change.

    `changed` says the next classes.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            owner = value.__self__ if type(value) is MethodType else None
            if not isinstance(owner, nn.Module) or owner not in changed:
                continue
            called = getattr(value.__func__, "__name__", "")
            now, then = (getattr(kind, called, None) for kind in (type(owner), changed[owner]))
            if now is value.__func__ and then is not now:  # no function of the user's, which calls what the module has
                raise InjectionError(
                    f"'{path}.{name}' is the method {called} of a {type(owner).__name__}, which "
                    f"{changed[owner].__name__} in its place does not have; keep the module and call it there"
                )


def _choose_sites(model: nn.Module, adapters: Iterable[Adapter]) -> list[tuple[Adapter, Site]]:
    """Return each attention once: if two adapters find one module, or one in the other, the first adapter wins."""
    chosen: list[tuple[Adapter, Site]] = []
    for owner in adapters:
        taken = [site.path for _, site in chosen]
        for site in owner.sites(model):
            if not within(site.path, taken) and not any(within(path, [site.path]) for path in taken):
                chosen.append((owner, site))
    return chosen


def _unknown(
    model: nn.Module, adapters: Iterable[Adapter], by_design: Container[str], known: Iterable[str]
) -> dict[str, nn.Module]:
    """Return the modules, by path, that look like attention or are some to an adapter, outside of `known` ones."""
    attention = {m for m in model.modules() if type(m).__name__ in by_design or any(a.attends(m) for a in adapters)}
    return unknown_attention(model, known, lambda module: module in attention or looks_like_attention(module))


def _run_own_examples(
    finding: Finding, adapters: Sequence[Adapter], by_design: Container[str], *, named: bool, allow_partial: bool
) -> bool:
    """Run examples of the adapters until no attention is missed; return whether one ran.

    If the caller `named` the adapters, attention that an earlier injection found counts only if one ran.
    """
    ran = False
    for owner in adapters:
        known = finding.taken if named and not ran else finding.ours()
        unknown = _unknown(finding.model, adapters, by_design, known)
        missed = [x for x, m in unknown.items() if type(m).__name__ not in by_design and x not in finding.left_alone]
        if known and not missed:
            break
        try:
            example = owner.example(finding.model, missed)
            if example is not None:
                finding.run(example, adapters, allow_partial=allow_partial)
                ran = True
        except InjectionError:
            if not allow_partial:
                raise
    return ran


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InjectionError(f"{model!r:.99} is not a torch.nn.Module; give the model itself, as in learner.model")
    wrappers = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule", "FSDPModule")
    for path, module in model.named_modules():
        found = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in wrappers]
        if found:
            raise InjectionError(
                f"{f'{path!r}' if path else 'the model'} is wrapped in {found[0]} already, which would not see the "
                "replaced modules; inject first, then wrap"
            )
    _refuse_observed(model)


def _refuse_observed(model: nn.Module) -> None:
    """Raise InjectionError if a Monitor watches a mechanism, because it would not see what follows."""
    for path, module in model.named_modules():
        if isinstance(module, Mechanism) and module.monitor is not None:
            raise InjectionError(
                f"'{path}' is observed by a Monitor, which would not see its successor; call remove() first"
            )


def _nothing_found(model: nn.Module, adapters: Iterable[Adapter], finding: Finding, *, ran: bool) -> str:
    tried = ", ".join(a.name for a in adapters)
    named = {type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()}
    lookalikes = sorted(named | {type(m).__name__ for m in finding.missed.values()})
    text = f"{type(model).__name__} has no attention that an adapter knows (tried: {tried})"
    if ran:
        text += ", and its run reached no call of scaled_dot_product_attention or its kin, and no softmax of q·k"
        text += "".join(f"; '{path}': {why}" for path, why in list(finding.left_alone.items())[:8])
    if has_mechanism(model):
        return f"{text}; it has attention of quest_core, which is chosen where it is built: attention=..."
    if lookalikes:
        text += f"; modules that look like attention: {', '.join(lookalikes)}"
    text += "".join(f"; {problem}" for p in plugins() if p.running and isinstance(problem := p.load(), PluginError))
    if not ran:
        text += f"; {BY_EXAMPLE}"
    return text + f"; write an adapter ({GUIDE}) or use quest_core.Attention in your model"
