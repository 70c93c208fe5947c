"""Find attention that is written out: run an example, follow every product, and judge what was seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import is_compiling, may_read
from ..config import AttentionConfig
from ..errors import InjectionError, UnsupportedError
from ..mechanism import Mechanism
from .adapter import Adapter, Capabilities, Site, refusal
from .following import (
    BY_HAND,
    LEARNED,
    OTHER_PRODUCTS,
    PRODUCTS,
    SOFTMAX,
    Flow,
    Flows,
    Following,
    Origin,
    alpha,
    equation,
    factor_of,
    name_of,
    operands,
    tensors,
)
from .sites import Watching, common_norm, in_autograd_function, looks_like_attention, norm_note, within
from .universal import beyond_operands
from .written import HIDDEN, Product, Written, WrittenOut, prepare


@dataclass(eq=False)
class _Frame:
    """One call of a module; `begin` and `end` count the products and softmaxes before it and after it."""

    path: str
    module: nn.Module
    begin: tuple[int, int]
    end: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class _Softmax:
    """One softmax: the flows of its logits, its result, and the call in which its products were formed too."""

    terms: Flows
    origin: Origin
    owner: _Frame
    axes: dict[Origin, set[str]]  # the letters of each product along which the softmax sums
    plain: bool  # whether its logits come from a projection, as far as they come from no product
    causal: bool = False


@dataclass(frozen=True)
class _Operand:
    """One operand of a product."""

    sizes: dict[str, int]  # of its axes, by letter
    features: set[str] | None  # the letters along which the features of its projection change; None if not known
    factor: float | None  # of the host; None if it cannot be separated
    norm: float | None  # that all its vectors have
    seen: tuple[float, float] | None  # sums that other values do not have


_NONE = _Operand({}, None, None, None, None)


class _Search(Watching, Following):
    """Runs the example, and notes all products and softmaxes with what is needed to judge them."""

    def __init__(self, model: nn.Module, skip: Callable[[str], bool]) -> None:
        super().__init__(model, places=True)
        self.skip = skip
        self.running: list[_Frame] = []
        self.frames: list[_Frame] = []
        self.products: list[Origin] = []
        self.softmaxes: list[_Softmax] = []
        self.by_hand: dict[str, str] = {}  # path -> function
        self.made = {id(x): ref(x) for x in (*model.parameters(), *model.buffers())}  # what PyTorch's functions made
        self.unseen: set[str] = set()  # paths of modules in which something else made a tensor

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if not self.running:
            self._make(inputs)
        frame = _Frame(self.paths[module], module, (len(self.products), len(self.softmaxes)))
        self.running.append(frame)
        self.frames.append(frame)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._use(output)
        self._make(output)
        self.running.pop().end = len(self.products), len(self.softmaxes)

    def _make(self, values: Any) -> None:
        self.made |= {id(x): ref(x) for x in tensors((values,))}

    def _use(self, values: Any) -> None:
        """Note the running modules if no function of PyTorch that was seen made one of some tensors."""
        for x in tensors((values,)):
            known = self.made.get(id(x))
            if x.is_floating_point() and (known is None or known() is not x):
                self._hide()

    def _hide(self) -> None:
        self.unseen.update(frame.path for frame in self.running)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.running or is_compiling():
            return out
        self._use((*args, *kwargs.values()))
        self._make(out)
        if type(func).__module__ == "torch._ops":  # an operator of the host or of its kernels
            self._hide()
        if any(isinstance(frame.module, Mechanism) or self.skip(frame.path) for frame in self.running):
            return out
        name = name_of(func)
        if name in PRODUCTS:
            self._product(name, args, kwargs, out)
        elif name == SOFTMAX:
            self._softmax(args, kwargs, out)
        elif name in OTHER_PRODUCTS and isinstance(out, Tensor):
            self.new(out, Origin("product", name, frames=tuple(self.running)), odd=name)
            self._hide()
        else:
            self.follow(name, func, args, kwargs, out)
            if name == "mul" and isinstance(out, Tensor):
                self._by_entries(args, out)
        return out

    def _by_entries(self, args: Any, out: Tensor) -> None:
        """Begin at queries times keys by entries, which a sum over features would follow."""
        pair = [x for x in args if isinstance(x, Tensor) and out.numel() > x.numel() > 1 and not self.is_parameter(x)]
        if len(pair) == 2 and all(any(flow.origin.axis is not None for flow in self.flows(x)) for x in pair):
            origin = Origin("product", "mul", frames=tuple(self.running))
            self._hide()
            self.new(out, origin, odd="a sum of products by entries", also=self.flows(out))

    def _product(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        origin = Origin("product", name, len(self.products), frames=tuple(self.running))
        self.products.append(origin)
        parts = operands(name, args, kwargs)
        if parts is None:
            self.new(out, origin, odd=f"{name} of more than two tensors")
            return
        if in_autograd_function():
            self.new(out, origin, odd="an autograd.Function with a derivative of its own")
            return
        head, a, b, rest = parts
        pair, letters = (a, b), equation(name, head, a, b)
        origin.learned = tuple(self.is_parameter(x) for x in pair)
        weights = self._apply(pair, letters, origin.learned)
        if all(origin.learned) or (weights and not any(origin.learned)):
            origin.kind, origin.learned = "plain", ()
        if not letters or len(_contracted(letters)) != 1:
            self.new(out, origin, odd=None if origin.is_plain else f"{name} over {letters or 'vectors'}")
            return
        origin.equation = letters
        if any(origin.learned):  # a projection, whose features are those of the parameter
            parameter, other = letters[origin.learned.index(True)], letters[origin.learned.index(False)]
            own = [s for s in parameter if s in letters[2] and s not in other]
            origin.axis = letters[2].index(own[-1]) if own else None
            origin.mixes = tuple(f.origin for x in pair for f in self.flows(x) if f.origin.kind == "product")
        if origin.kind == "product":
            origin.operands = tuple(self._operand(x, s, letters) for x, s in zip(pair, letters, strict=False))
        kept = tuple(flow._replace(entries=None) for flow in weights) if any(origin.learned) else ()
        self.new(out, origin, alpha(rest), also=(*self.added(head, rest), *kept))

    def _operand(self, x: Tensor, own: str, letters: tuple[str, str, str]) -> _Operand:
        flow = next((flow for flow in self.flows(x) if flow.origin.is_plain), None)
        features = None
        if flow is not None and flow.entries is not None and flow.origin.axis is not None:
            features = {s for i, s in enumerate(own) if flow.origin.axis in _varying(flow, i)}
        sizes = dict(zip(own, x.shape, strict=True))
        if not may_read(x, waits=True):
            return _Operand(sizes, features, factor_of(self.flows(x)), None, None)
        wide = x.detach().double()
        vectors = wide.movedim(own.index(_contracted(letters)[0]), -1)
        norm = common_norm(vectors, 2e-3 if x.dtype == torch.float32 else 1e-2)
        values = wide.flatten()
        seen = (values.sum().item(), (values * torch.linspace(1, 2, len(values)).to(values)).sum().item())
        return _Operand(sizes, features, factor_of(self.flows(x)), norm, seen)

    def _apply(self, pair: Any, letters: tuple[str, str, str] | None, learned: Sequence[bool]) -> list[Flow]:
        """Return the weights that a product applies to values, and note on them over which axis."""
        found = []
        for i, x in enumerate(pair):
            for flow in self.flows(x):
                logits = flow.origin.kind == "product" and not flow.origin.is_plain
                if logits and flow.odd in BY_HAND and not learned[1 - i]:
                    self.by_hand.setdefault(flow.origin.frames[-1].path, flow.odd)
                if flow.origin.kind == "softmax":
                    found.append(flow)
                if flow.origin.kind != "softmax" or learned[1 - i]:
                    continue
                axis, use = flow.origin.axis, "applied"
                if flow.entries is not None and letters and axis is not None and flow.origin.shape[axis] > 1:
                    over = {s for place, s in enumerate(letters[i]) if axis in _varying(flow, place)}
                    use = "applied" if over & set(_contracted(letters)) else "kept"
                flow.origin.uses.append(use)
        return found

    def _owner(self, terms: Flows) -> _Frame:
        """Return the innermost running module in which all products of some logits were formed."""
        formed = [one for flow in terms for one in (flow.origin.mixes or (flow.origin,))]
        around = [
            frame
            for level, frame in enumerate(self.running)
            if all(len(one.frames) > level and one.frames[level] is frame for one in formed)
        ]
        return around[-1] if around else self.running[0]

    def _softmax(self, args: Any, kwargs: Any, out: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        terms = tuple(flow for flow in self.flows(logits) if flow.origin.kind == "product" or flow.origin.mixes)
        origin = Origin("softmax", SOFTMAX, axis=(-1 if dim is None else dim) % max(out.dim(), 1))
        own = tuple(flow for flow in terms if not any(isinstance(use, _Softmax) for use in flow.origin.uses))
        owner = self._owner(own)
        if any(owner in flow.origin.frames for flow in terms if flow not in own):
            own = ()
        if own:  # logits of earlier modules, which are sites too, are added to those of this one
            terms = own
        else:
            owner = self._owner(terms)
        made = _Softmax(terms, origin, owner, {}, any(flow.origin.axis is not None for flow in self.flows(logits)))
        self.softmaxes.append(made)
        if not terms:
            return
        for flow in terms:
            result = flow.origin.equation[2]
            if flow.entries is not None and result:
                made.axes[flow.origin] = {result[axis] for axis in _varying(flow, origin.axis or 0)}
            for one in (flow.origin, *flow.origin.mixes):
                one.uses.append(made)
        if out.dim() > 1 and may_read(logits, waits=True):
            n, m = out.shape[-2:]
            future = torch.ones(n, m, dtype=torch.bool, device=out.device).triu(m - n + 1)
            made.causal = bool(future.any()) and bool(((logits <= HIDDEN) | ~future).all())
        self.new(out, origin)


def _contracted(letters: tuple[str, str, str]) -> list[str]:
    return [s for s in letters[0] if s in letters[1] and s not in letters[2]]


def _varying(flow: Flow, dim: int) -> set[int]:
    """Return the axes of the origin along which places change along the axis `dim` of the tensor."""
    assert flow.entries is not None
    shape, index = flow.origin.shape, flow.entries
    rows = index.movedim(dim, -1).reshape(-1, index.shape[dim])
    rows = rows[:: max(len(rows) // 512, 1)]
    real, found = rows > 0, set()
    for axis, size in enumerate(shape):
        place = (rows - 1).div(math.prod(shape[axis + 1 :]), rounding_mode="floor") % size
        most, least = place.masked_fill(~real, -1).amax(-1), place.masked_fill(~real, size).amin(-1)
        if bool((most > least).any()):
            found.add(axis)
    return found


def _layout(flow: Flow) -> str | None:
    """Return the letters of a product in the order in which logits hold its entries; None if they hold others too."""
    shape, result, index = flow.origin.shape, flow.origin.equation[2], flow.entries
    if index is None or index.numel() != math.prod(shape):
        return None
    order = "".join(result[i] for axis in range(index.dim()) for i in sorted(_varying(flow, axis)))
    order = "".join(dict.fromkeys(order))
    for place, letter in enumerate(result):  # an axis of one entry varies nowhere
        order = order if letter in order else order[:place] + letter + order[place:]
    entries = torch.arange(1, index.numel() + 1).view(shape).permute([result.index(s) for s in order])
    return order if torch.equal(entries.reshape(index.shape), index.long()) else None


class _Judge:
    """Decides for each module of a search whether it is a site, is kept, or is refused, and why."""

    def __init__(self, search: _Search, again: Callable[[], _Search]) -> None:
        self.search, self.again = search, again
        self.sites: dict[str, Written] = {}
        self.refused = {path: f"it spells its softmax by {name}" for path, name in search.by_hand.items()}
        self.left: dict[str, str] = {}
        self._other: list[Origin] | None = None
        for frame in search.frames:
            softmaxes = search.softmaxes[frame.begin[1] : frame.end[1]]
            if any(one.owner is frame and one.plain and not one.terms for one in softmaxes):
                outer = frame.path.rpartition(".")[0] if isinstance(frame.module, nn.Softmax) else frame.path
                self.left.setdefault(outer, "its softmax is of no product of two activations")
            try:
                self._frame(frame, [one for one in softmaxes if one.owner is frame and one.terms])
            except UnsupportedError as error:
                self.refused.setdefault(frame.path, str(error))
        self.sites = {path: site for path, site in self.sites.items() if path not in self.refused}
        lost = [one.owner.path for one in search.softmaxes if not one.terms and not one.plain]
        for origin in search.products:
            path = origin.frames[-1].path
            if all(operand.features for operand in origin.operands or (_NONE,)):
                if not any(within(other, [path]) for other in lost):
                    self.left.setdefault(path, "no softmax follows its products of two activations")
                elif not origin.uses:
                    self.refused.setdefault(path, "between its product and its softmax stands a compiled kernel")
        for frame in search.frames:
            if frame.begin == frame.end and looks_like_attention(frame.module) and frame.path not in search.unseen:
                self.left.setdefault(frame.path, "it forms no product of two activations and no softmax")
        self.left = {path: why for path, why in self.left.items() if path not in {*self.sites, *self.refused}}

    def _frame(self, frame: _Frame, softmaxes: list[_Softmax]) -> None:
        """Judge one call of a module."""
        roles: dict[Origin, Product] = {}
        found: list[Written] = []
        for softmax in softmaxes:
            uses = softmax.origin.uses
            if "by entries" in uses and not all(any(flow.origin.learned) for flow in softmax.terms):
                uses.append("applied")
            if not {"applied", "kept"} & {*uses}:
                self.left.setdefault(frame.path, "the softmax of its product is applied to no values")
            elif self._is_over_channels(softmax):
                self.left.setdefault(frame.path, "it attends over channels, and not over tokens")
            else:
                flow = self._content(softmax)
                roles[flow.origin], one = self._role(softmax, flow)
                found.append(replace(one, path=frame.path))
        if not roles:
            return
        facts = functools.reduce(Written.joined, found)
        start, stop = frame.begin[0], frame.end[0]
        products: list[Product | None] = [
            roles.get(origin, None if origin.is_plain else Product(origin.equation))
            for origin in self.search.products[start:stop]
        ]
        terms = [
            tuple(
                sorted(
                    (flow.origin.number - start, flow.factor)
                    for flow in softmax.terms
                    if flow.origin in roles or not flow.origin.is_plain
                )
            )
            for softmax in self.search.softmaxes[frame.begin[1] : frame.end[1]]
        ]
        count = _period(products, terms)
        products, terms = products[: len(products) // count], terms[: len(terms) // count]
        site = replace(facts, products=tuple(products), softmaxes=tuple(terms))
        known = self.sites.get(frame.path)
        self.sites[frame.path] = site if known is None else known.joined(site)

    def _is_over_channels(self, softmax: _Softmax) -> bool:
        """Return whether tokens are contracted and features attend, as in XCiT."""
        for origin, over in softmax.axes.items():
            for operand, own in zip(origin.operands, origin.equation, strict=False):
                if operand.features is not None and over & {*own} & operand.features:
                    return not operand.features & {*_contracted(origin.equation)}
        return False

    def _content(self, softmax: _Softmax) -> Flow:
        """Return the product of queries and keys among the terms of a softmax; the others are of positions."""
        terms = softmax.terms
        if any(flow.origin.mixes for flow in terms):
            raise UnsupportedError("it mixes the logits of its heads before the softmax (talking heads)")
        if len(terms) > 1:
            terms = tuple(flow for flow in terms if not self._is_position(flow.origin))
        if len(terms) != 1:
            raise UnsupportedError(
                f"{len(softmax.terms)} products meet under one softmax, {len(terms)} of them of two activations"
            )
        flow = terms[0]
        if flow.odd == LEARNED and all(operand.norm for operand in flow.origin.operands):
            raise UnsupportedError("it is cosine attention: its cosines are multiplied by a learned temperature")
        if flow.odd:
            raise UnsupportedError(f"between the product and the softmax stands {flow.odd}")
        if sum("applied" in one.origin.uses for one in flow.origin.uses) > 1:
            raise UnsupportedError("two softmaxes share one product")
        if "applied" not in softmax.origin.uses:
            raise UnsupportedError("its softmax is over the queries (slot attention)")
        return flow

    def _is_position(self, origin: Origin) -> bool:
        """Return whether an operand is a parameter, or is the same for other inputs."""
        if self._other is None:
            self._other = self.again().products
        if len(self._other) != len(self.search.products):
            raise UnsupportedError("its products depend on the values of the input")
        if origin.number < 0 or not origin.operands:
            return False
        pairs = zip(origin.operands, self._other[origin.number].operands, strict=False)
        return any(origin.learned) or any(one.seen == two.seen for one, two in pairs)

    def _role(self, softmax: _Softmax, flow: Flow) -> tuple[Product, Written]:
        """Return the role of a product and the facts about it; UnsupportedError if it is not understood."""
        origin = flow.origin
        letters, over = origin.equation, softmax.axes.get(flow.origin, set())
        keys = [i for i in (0, 1) if over and over <= {*letters[i]} - {*letters[1 - i]}]
        if not over:
            raise UnsupportedError("the axis of its softmax is not found; use an example with more than one token")
        if len(keys) != 1:
            raise UnsupportedError("the axis of its softmax belongs to queries and keys")
        query, key = 1 - keys[0], keys[0]
        q, k = origin.operands[query], origin.operands[key]
        if origin.learned[key]:
            raise UnsupportedError("its keys are parameters (a router or a memory)")
        if q.factor is None or k.factor is None:
            raise UnsupportedError("a factor on its queries or keys is followed by more than moves")
        if flow.factor <= 0:
            raise UnsupportedError(f"it multiplies its logits by {flow.factor:g}")
        (feature,) = _contracted(letters)
        batch = {*letters[2]} - over
        split = [s for s in letters[query] if s in batch and s in (q.features or ())]
        factors = q.factor, k.factor, flow.factor
        product = Product(letters, query, factors, _keeps_factor(q, k, factors))
        if len(split) == 1 and [*map(len, replace(product, head=split[0]).axes)] == [1] * 5:
            product = replace(product, head=split[0])
        tokens = math.prod(q.sizes[s] for s in letters[query] if s in batch - {*letters[key], *split})
        return product, Written(
            "",
            (product,),
            (),
            heads=q.sizes[split[0]] if product.head else 1,
            kv_heads=k.sizes.get(split[0], 1) if product.head else 1,
            head_dim=q.sizes[feature],
            causal=softmax.causal,
            cross=tokens != math.prod(k.sizes[s] for s in over),
            layout=_layout(flow) if over == {*product.axes[3]} else None,
            note=norm_note(k.norm),
        )


def _keeps_factor(q: _Operand, k: _Operand, factors: tuple[float, float, float]) -> bool:
    """Return whether the factor on queries is a part of the host's norm; UnsupportedError for cosine attention."""
    if q.norm is None:
        return False
    if k.norm is None or abs(factors[2] * k.norm - 1) < 0.1:
        return True
    if abs(factors[0] * factors[2] * k.norm - 1) < 0.1:
        return False
    raise UnsupportedError(
        "it is cosine attention: queries and keys are normalized, and their cosine is multiplied by "
        f"{factors[2] * k.norm * q.norm:.3g}"
    )


def _period(products: list[Any], softmaxes: list[Any]) -> int:
    """Return how often a module repeats the same products and softmaxes in one forward."""
    for count in range(len(softmaxes), 1, -1):
        if len(products) % count or len(softmaxes) % count:
            continue
        n, m = len(products) // count, len(softmaxes) // count
        shifted = [tuple((place - i // m * n, factor) for place, factor in x) for i, x in enumerate(softmaxes)]
        if products == products[:n] * count and shifted == shifted[:m] * count:
            return count
    return 1


class WrittenAdapter(Adapter):
    """Adapter for every module that writes its attention out.

    Args:
        example: as in :func:`quest_core.inject`. None finds only modules that were injected before.
        taken: paths of the modules that other adapters replace, which are not looked into.
        allow_partial: go on if attention is written out in a way that is not understood.

    Attributes:
        refused: path of a module whose attention is not understood -> why; set by `sites`.
        left: path of a module that has no softmax of q·k over tokens, by what it did -> why; set by `sites`.
        called: paths of the modules that call scaled_dot_product_attention; set by `inject`.
    """

    name: ClassVar[str] = "written out"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, example: Any = None, taken: Sequence[str] = (), *, allow_partial: bool = False) -> None:
        self.example, self.taken, self.allow_partial = example, list(taken), allow_partial
        self.refused: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.called: list[str] = []
        self._written: dict[str, Written] = {}

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Return the modules that write their attention out, in the order of their first forwards.

        Raises:
            InjectionError: a site contains another attention, or has an attribute that a site needs.
            UnsupportedError: attention is written out in a way that is not understood.
        """
        modules = dict(model.named_modules())
        known = {path: module.written for path, module in modules.items() if isinstance(module, WrittenOut)}

        def skip(path: str) -> bool:
            return within(path, self.taken) or path in known

        if self.example is not None:
            search = _Search(model, skip).run(self.example)
            judge = _Judge(search, lambda: _Search(model, skip).run(self.example, changed=True))
            self.refused, self.left = judge.refused, judge.left
            known |= judge.sites
            ran = {frame.path for frame in search.frames}
            ours = (*known, *self.refused, *self.called, *self.taken)
            alike = {type(modules[path]) for path in self.left} - {type(modules[path]) for path in ours}
            for path, module in modules.items():
                if type(module) in alike and path not in ran:
                    self.left.setdefault(path, "it did not run, and others of its class have no attention")
        if self.refused and not self.allow_partial:
            shown = "; ".join(
                f"'{path}' ({type(modules[path]).__name__}): {why}" for path, why in list(self.refused.items())[:8]
            )
            raise UnsupportedError(f"attention that is written out is not understood: {shown}")
        self._written = known
        for path, written in known.items():
            others = [other for other in (*known, *self.called, *self.taken) if other != path or other in self.called]
            for other in others:
                if within(other, [path]) or (other in self.called and within(path, [other])):
                    raise InjectionError(
                        f"'{path}' writes attention out, and '{other}' in or around it is another attention; move one "
                        "of them into a module of its own"
                    )
            if hasattr(modules[path], "mechanism") and not isinstance(modules[path], WrittenOut):
                raise InjectionError(f"'{path}' has an attribute 'mechanism', which a site needs; rename it")
            asked = Capabilities(causal=written.causal, cross=written.cross, regroups=False)
            yield Site(path, modules[path], written.heads, written.head_dim, asked, note=written.note)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the module with its class changed and a mechanism added; its parameters are the same objects."""
        return prepare(site.module, self._written[site.path], config)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the operands of the product and the place of the softmax, or None."""
        written = self._written[site.path]
        if why := beyond_operands(config, softmax=False):
            return why
        for part in config.components:
            if part.learnable and any(product.head is None for product in written.sites):
                return f"'{part.name}' must know the axis of heads, which the example does not show"
            if part.learnable and len(written.sites) > 1:
                return f"one forward has {len(written.sites)} products, and '{part.name}' keeps something for each"
            if part.axis == "normalizer" and not part.fused and written.layout is None:
                return f"'{part.name}' needs logits of queries and keys only, [..., N, M]"
        return refusal(config, site.capabilities)
