"""The contract that a plugin implements: where a host's attention is, and what replaces it.

A plugin ships one :class:`Adapter`, which lists a :class:`HostAttention` for each attention class of its host.
Everything that is the same for all hosts (refusals, random state, atomic replacement, the report, checkpoints) lives in
:mod:`quest_core.hosts.inject`.
"""

import functools
import logging
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..config import STANDARD, AttentionConfig
from ..drafts import draft, host_class
from ..errors import InjectionError, UnsupportedError
from ..mechanism import Mechanism, head_sizes
from ..notices import LOGGER, Forward
from ..projections import HeadSizes, Projected, Projections
from ..registry import list_mechanisms
from .patching import Patches

Made = TypeVar("Made", bound="HostAttention")


@dataclass(frozen=True)
class Capabilities:
    """What a host, or one site of it, demands of a mechanism and what it offers.

    Demands; if one is True, a mechanism must support it:

        causal: the host attends causally.
        cross: queries and keys come from different sequences.
        cached: the host decodes incrementally.
        weights: the host reads the attention weights or passes logits on.
        dropout: the host drops attention weights in training.
        rotary: the host turns queries and keys by their positions.
        pairs: the host hides or weighs single pairs of queries and keys, by a mask or a bias by relative position.
        independent: in evaluation the output of a sample must not depend on the other samples of its batch.

    Offers; if one is False, a mechanism that needs it is refused:

        ordered: tokens have an order; False for sets and graphs.
        regroups: the key/value projections may get fewer heads than the queries.
        narrows_keys: the key projection may get another width than the query's (aft-conv).
        hands_on_input: the mechanism gets the input of the layer.
    """

    causal: bool = False
    cross: bool = False
    cached: bool = False
    weights: bool = False
    dropout: bool = False
    rotary: bool = False
    pairs: bool = False
    independent: bool = False
    ordered: bool = True
    regroups: bool = True
    narrows_keys: bool = False
    hands_on_input: bool = False


@dataclass(frozen=True)
class Site:
    """One attention module of a host model.

    Attributes:
        path: dotted path inside the model ("" for the model itself).
        module: the module that `Adapter.replace` will be given.
        num_heads: query heads.
        head_dim: features per query/key head.
        capabilities: what this site asks of a mechanism.
        attention: the one that `inject` gives it; `inject` sets this and `fresh`.
        fresh: the weights have only been initialized, not trained. Where a mechanism needs fewer key heads,
            `quest_core.projections.pool_heads` keeps one of each group of fresh heads and averages trained ones.
        stack: the stack of layers it belongs to, where paths that differ only in numbers do not say it: what
            compares a layer with the one before (elliptical) does so within a stack.
        note: a remark for the report.
    """

    path: str
    module: nn.Module
    num_heads: int
    head_dim: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    attention: AttentionConfig = STANDARD
    fresh: bool = False
    stack: str | None = None
    note: str = ""


class HostAttention(Projected):
    """Base of what replaces a host's attention: describe `projections`, and write `forward` with the host's arguments.

    A subclass that also inherits the host's class keeps its names, methods and initialization. No __init__ runs: the
    attributes are those of the host's module, with `config`, `head_sizes` and `mechanism`.
    """

    mechanism: Mechanism
    capabilities: ClassVar[Capabilities] = Capabilities()
    """What every module of this class asks of a mechanism, besides dropout."""
    hides_by_infinity: ClassVar[bool] = False
    """Whether `forward` makes additive masks that hide by −inf only, which saves a pass over them."""
    drops_weights: ClassVar[bool] = False
    """Whether `attend` drops formed weights, so that a seeded run drops the same ones as a host that forms them."""

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the arguments `num_heads`, `head_dim` and others of `adopt` for a module of the host."""
        return {"num_heads": host.num_heads, "head_dim": host.head_dim}

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        """Return what a module asks of a mechanism: `capabilities`, and dropout if its `attn_drop` drops."""
        return replace(cls.capabilities, dropout=rate(getattr(host, "attn_drop", 0.0)) > 0)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Return why a module cannot honor `config`, for reasons besides its capabilities; by default None."""
        return None

    @classmethod
    def adopt(
        cls: type[Made],
        host: nn.Module,
        config: AttentionConfig,
        *,
        num_heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        standard_scale: float | None = None,
        fresh: bool = False,
    ) -> Made:
        """Return the draft of a replacement, with the attributes, parameters and sub-modules of `host`.

        Override it to set attributes.

        Args:
            num_heads, head_dim, value_dim: as in `quest_core.mechanism.head_sizes`.
            kv_heads: key/value heads of the host's own model; `num_heads` by default.
            standard_scale: the host's factor on q·k; 1/√D by default.
            fresh: the weights have only been initialized; see `quest_core.projections`.

        Raises:
            InputError: `host` is a replacement whose keys and values were reduced already.
        """
        made: Any = draft(host, cls)
        made.config = config
        made.head_sizes = head_sizes(config, num_heads, head_dim, value_dim, kv_heads)
        made.mechanism = mechanism_for(made, config, made.head_sizes, standard_scale, projections=cls.projections)
        made.mechanism.hides_by_infinity = cls.hides_by_infinity
        made.projections.shrink(made, made.head_sizes, fresh=fresh)
        return made  # type: ignore[no-any-return]

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, N, H·D] as [B, H, N, D], k [B, M, G·Dk] as [B, G, M, Dk] and v [B, M, G·Dv] alike; views."""
        heads = (self.head_sizes.num_heads, self.kv_heads, self.kv_heads)
        q, k, v = [x.unflatten(-1, (n, -1)).transpose(-3, -2) for x, n in zip((q, k, v), heads, strict=True)]
        return q, k, v

    def split_packed(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `split` of queries, keys and values side by side, [B, N, H·D + G·Dk + G·Dv]."""
        return self.split(*qkv.split(self.head_sizes.widths, -1))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        dropout_p: float | None = None,
    ) -> Tensor:
        """Return the heads' outputs side by side, [B, N, H·Dv]; `is_causal` is aligned at the last query.

        In evaluation, forward hooks on `attn_drop` see the weights, as tools that draw attention maps expect.

        Args:
            q: [B, H, N, D].
            k, v: [B, G, M, Dk] and [B, G, M, Dv].
            mask: boolean (True = may attend) or additive, broadcastable to [B, H, N, M].
            dropout_p: on the weights; by default the rate of `attn_drop` in training.
        """
        if dropout_p is None:
            dropout_p = rate(getattr(self, "attn_drop", 0.0)) if self.training else 0.0
        how: Any = {"attn_mask": mask, "is_causal": is_causal, "dropout_p": dropout_p}
        if self.drops_weights and dropout_p > 0:
            out, _ = self.mechanism.forward_with_weights(q, k, v, **how)
        elif self._shows_weights():
            out, weights = self.mechanism.forward_with_weights(q, k, v, **how)
            if self.attn_drop(weights) is not weights:
                raise UnsupportedError(
                    f"a hook on attn_drop changes the weights of attention '{self.mechanism.config}', which the output "
                    "was made of; expected a hook that only reads them"
                )
        else:
            out = self.mechanism(q, k, v, **how)
        return out.transpose(-3, -2).flatten(-2)

    def _shows_weights(self) -> bool:
        """Whether hooks of others see weights; a family has none, and tools hook every module without wanting any."""
        watched = getattr(getattr(self, "attn_drop", None), "_forward_hooks", None)
        return bool(watched) and not self.training and self.mechanism.family is None


def mechanism_for(
    host: nn.Module,
    config: AttentionConfig,
    sizes: HeadSizes,
    scale: float | None,
    *,
    projections: Projections | None = None,
    like: Tensor | None = None,
) -> Mechanism:
    """Return a mechanism on the device, in the type and in the mode of the module that it becomes a part of.

    Its parameters are frozen if all `projections` of the host are, or without these all its parameters. `scale` is the
    host's factor on q·k, None for 1/√D; `like` has the device and the type where the host has no parameters.
    """
    heads = {"num_heads": sizes.num_heads, "head_dim": sizes.head_dim, "kv_heads": sizes.kv_heads}
    made = Mechanism(config, **heads, standard_scale=scale, projected=True)
    like = next((p for p in host.parameters() if p.is_floating_point()), like)
    if like is not None:
        made.to(device=like.device, dtype=like.dtype)
    names = [""] if projections is None else [name for name, _ in projections.entries]
    held = [p for name, p in host.named_parameters() if any(f"{name}.".startswith(f"{n}.") or not n for n in names)]
    if held and not any(p.requires_grad for p in held):
        made.requires_grad_(False)
    return made.train(host.training)


def rate(dropout: Any) -> float:
    """Return the probability of a dropout, which hosts keep as a module or as this number."""
    return float(getattr(dropout, "p", dropout))


def refuses_chained(config: AttentionConfig) -> str | None:
    """Return why layers whose tokens change places (in windows, in stages) cannot honor `config`, or None.

    Chained attention, such as elliptical, compares the tokens of a layer with those of the layer before.
    """
    if any(part.chained for part in config.components):
        return f"'{config}' compares the tokens of each layer with those of the one before, which differ here"
    return None


def window_bias(bias: Tensor, mask: Tensor | None, batch: int) -> Tensor:
    """Return the bias of shifted windows (Swin) with the pairs hidden that the shift has brought together.

    Args:
        bias: by relative position, [1, H, N, N].
        mask: [W, N, N] for the W windows of an image, negative (−100 in Swin) where a pair is hidden; or None.
        batch: windows of all images, B·W.

    Returns:
        Additive, [1 or B·W, H, N, N].
    """
    if mask is None:
        return bias
    hidden = mask.masked_fill(mask < 0, -torch.inf)[:, None]  # [W, 1, N, N]
    return (bias + hidden).repeat(batch // len(mask), 1, 1, 1)


def sections(config: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every mapping inside a host's nested config with its dotted path, the outer ones first."""
    if isinstance(config, Mapping):
        yield path, config
    items: Any = config.items() if isinstance(config, Mapping) else ()
    for name, inner in enumerate(config) if isinstance(config, list | tuple) else items:
        yield from sections(inner, f"{path}.{name}".lstrip("."))


class Adapter(ABC):
    """The answers of a plugin about its host. Most list `replacements` and inherit the rest."""

    name: ClassVar[str]
    """The host's name, as in ``quest-<name>``."""
    replacements: ClassVar[Mapping[str, type[HostAttention]]] = {}
    """The host's attention classes by dotted name, such as ``timm.layers.attention.Attention``, and what replaces each.
    Subclasses of a host's class are other classes."""

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module, or None. It is the same after the module was replaced."""
        kind = host_class(module)
        if issubclass(kind, HostAttention):  # built and not injected
            return kind if kind in self.replacements.values() else None
        return self.replacements.get(f"{kind.__module__}.{kind.__qualname__}")

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every attention module of this host in `model`, in the order of the forward pass.

        The default yields the modules that have a `replacement`; one that was replaced before has it too.
        """
        for path, module in model.named_modules():
            kind = self.replacement(module)
            if kind is not None:
                yield self.site(path, module, kind, model)

    def site(self, path: str, module: nn.Module, kind: type[HostAttention], model: nn.Module) -> Site:
        """Return the site of one module that `kind` replaces."""
        sizes = kind.sizes(module)
        return Site(path, module, sizes["num_heads"], sizes["head_dim"], kind.asks(module, path, model))

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft (`quest_core.drafts`) of a module that takes the host's calls of `site.module`.

        It keeps the host's parameter objects and names. `inject` changes the model after all drafts are made.
        """
        kind = self.replacement(site.module)
        assert kind is not None
        return kind.adopt(site.module, config, fresh=site.fresh, **kind.sizes(site.module))

    def attends(self, module: nn.Module) -> bool:
        """Return whether a module that stays is attention, though neither its name nor its layers say so."""
        return False

    def example(self, model: nn.Module, missed: Collection[str]) -> Any:
        """Return an `example` for `inject` that runs attention which this adapter does not list, or None.

        `inject` asks where the caller gives none and adapters find nothing, or miss modules that look like attention.

        Args:
            model: the whole one; it may hold a model of this host.
            missed: paths of these modules; without any, adapters found nothing.

        Raises:
            InjectionError: this host has a way to make one, and it does not suit this model.
        """
        return None

    leaves_alone: ClassVar[Mapping[str, str]] = {}
    """Class names of attention modules of this host that stay as they are by design, such as deformable attention in a
    pixel decoder, and why, which the report repeats. Any other that stays is an error, unless `inject` gets
    `allow_partial`."""
    kernels_attend: ClassVar[bool] = True
    """Whether code that no function of PyTorch shows, such as a compiled kernel, may be attention where no softmax is
    seen. An adapter says False if it knows all attention functions of the host; such modules then keep their class."""
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

        `logger` is called for every record, because hosts make their logger late and once for each run.
        """
        handler = Forward(logger)
        LOGGER.setLevel(logging.INFO)
        add, remove = (functools.partial(change, handler) for change in (LOGGER.addHandler, LOGGER.removeHandler))
        self.patches.once("notices", add, remove)

    def connect(self, model: nn.Module, drafts: dict[nn.Module, Any]) -> None:  # noqa: B027
        """Give the drafts what they need from the model around them, after all are made; by default nothing.

        Args:
            model: as it is before the replacement; do not change it.
            drafts: module of `model` -> its draft. Add the drafts of other modules that must change.
        """

    def disconnect(self, model: nn.Module) -> None:  # noqa: B027
        """Undo `connect` where a model was built with attention of quest_core; its modules are the host's again.

        It must not raise.
        """

    def kernel(self, site: Site, made: nn.Module) -> str:
        """Return what computes the attention of a replacement in training, as the report and the log say it.

        Override it for a host with functions of its own. The default is the function of PyTorch that the mechanism
        calls, or "written out" where weights are formed.
        """
        mechanism = next(part for part in made.modules() if isinstance(part, Mechanism))
        asked = site.capabilities
        forms = asked.weights or (asked.dropout and getattr(made, "drops_weights", False))
        return "written out" if forms else mechanism.kernel

    def projections(self, module: nn.Module) -> list[Projected]:
        """Return the parts that describe their projections of a module that `replace` made.

        Override it for replacements that keep the host's class: return `Projected` views of their parameters.
        """
        return [part for part in module.modules() if isinstance(part, Projected)]

    def scale_queries(self, module: nn.Module, factor: Tensor) -> None:
        """Multiply each head's query projection, bias included, in place: what `quest_core.calibrate` needs.

        Override it for queries that `quest_core.projections` cannot describe. `factor` is [H], float64 on the CPU.

        Raises:
            UnsupportedError: the module has not one `Projected`, or its weight is made from others.
        """
        found = self.projections(module)
        if len(found) != 1:
            raise UnsupportedError(
                f"{type(module).__name__} of the adapter '{self.name}' has {len(found)} parts with `projections`; "
                "expected one (quest_core.projections.Projected), so its query projection is not known"
            )
        found[0].projections.scale(found[0], found[0].head_sizes, "q", factor)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why this host cannot honor `config` at `site`, or None; override it for reasons of the host."""
        if (kind := self.replacement(site.module)) is None:
            return refusal(config, site.capabilities)
        if why := kind.refuses(site.module, site.path, config):
            return why
        value_dim = kind.sizes(site.module).get("value_dim") or site.head_dim
        if value_dim != site.head_dim and any(part.chained or not part.compares for part in config.components):
            return f"query heads have {site.head_dim} features and value heads {value_dim}, and it needs as many"
        return refusal(config, site.capabilities)


def refusal(config: AttentionConfig, asked: Capabilities) -> str | None:
    """Return why a mechanism cannot give what a site asks for, or None if it can."""
    for part in config.components:
        reasons = (  # one needs it, the other gives it; else why not
            (asked.causal, part.causal, f"it cannot be causal ({part.causal_reason})"),
            (asked.cross, part.cross, "it cannot attend across sequences"),
            (asked.cached, part.cached, "it cannot decode incrementally"),
            (asked.weights, part.axis != "family", "the host reads attention weights and it has none"),
            (asked.dropout, part.dropout, "it has no weights for the attention dropout, which would have to be 0"),
            (part.key_features is not None, asked.narrows_keys, "its keys are narrower than the host's"),
            ("order" in part.reads, asked.ordered, "it needs ordered tokens"),
            (
                asked.pairs,
                part.axis != "family",
                "the host hides or weighs single pairs, and it takes masks of keys only",
            ),
            (asked.rotary, part.compares, "its queries do not meet keys, where rotary positions act"),
            (part.needs_input, asked.hands_on_input, "it reads the layer's input, which this host does not hand on"),
            (part.reshapes, asked.regroups, "the host's projections cannot change their shape"),
            (
                asked.independent,
                "samples" not in part.reads or part.stateful,
                "its groups follow the keys of the whole batch, so that a sample's output depends on the others (dgqa "
                "keeps its groups outside of training)",
            ),
        )
        found = [why for needs, gives, why in reasons if needs and not gives]
        if found:
            return f"'{part.name}' is not possible here: {', and '.join(found)}"
    return None


def require(adapter: Adapter, site: Site, config: AttentionConfig) -> None:
    """Raise UnsupportedError, naming what the site can honor, unless that is `config`; InjectionError if it cannot be
    replaced because its calls go to a function that is bound to it, or its parameters have no values yet."""
    if any(vars(site.module).get(name) is not None for name in ("forward", "_compiled_call_impl")):
        raise InjectionError(
            f"'{site.path}' ({type(site.module).__name__}): its forward was replaced on the instance (by compile(), "
            "accelerate's device_map, ...), which would go on to call the host's attention; inject before that"
        )
    if any(nn.parameter.is_lazy(p) for p in site.module.parameters()):
        raise InjectionError(
            f"'{site.path}' ({type(site.module).__name__}) has no weights yet, because it takes their sizes from its "
            "first batch; run the model once before, or say example=batch"
        )

    def refuses(config: AttentionConfig) -> str | None:
        return adapter.refusal(site, config) or _refuses_ranks(site.module, config)

    why = refuses(config)
    if why is None:
        return
    known = dict.fromkeys(str(AttentionConfig.parse(name)) for name in list_mechanisms())  # softmax is "standard"
    able = [name for name in known if refuses(AttentionConfig.parse(name)) is None]
    where = f" at '{site.path}'" if site.path else ""
    raise UnsupportedError(
        f"attention '{config}' cannot be used in {type(site.module).__name__}{where} of {adapter.name}: {why}"
        + (f". Possible here: {', '.join(able)}" if able else "")
    )


def _refuses_ranks(module: nn.Module, config: AttentionConfig) -> str | None:
    """Return why a mechanism cannot serve a module whose heads tensor parallelism has divided among ranks, or None."""
    if any(hasattr(p, "placements") for p in module.parameters()):  # DTensor
        for part in config.components:
            if part.learnable or part.stateful or "heads" in part.reads:
                return (
                    f"its weights are divided among ranks (DTensor), and '{part.name}' learns or reads what belongs to "
                    "all heads, of which each rank has only its own"
                )
    return None
