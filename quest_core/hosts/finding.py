"""Find attention that no adapter knows: run an example, note calls, follow every product, and judge what was seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import force_eager, is_compiling, may_read
from ..config import AttentionConfig
from ..drafts import host_class
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
from .sites import (
    FoundSite,
    common_norm,
    in_autograd_function,
    looks_like_attention,
    norm_note,
    run_example,
    undisturbed,
    within,
)
from .universal import FUNCTIONS, Call, Routed
from .written import HIDDEN, Product, Written, WrittenOut

UNIVERSAL, WRITTEN_OUT = "universal", "written out"
"""Names of the adapters of what an example finds, as reports have them."""


@dataclass(eq=False)
class _Frame:
    """One call of a module.

    Attributes:
        known: it is a part of attention that is known, and not looked into.
        begin, end: how many products and softmaxes there were before it and after it.
        calls: how often it called an attention function.
    """

    path: str
    module: nn.Module
    known: bool
    begin: tuple[int, int]
    end: tuple[int, int] = (0, 0)
    calls: int = 0


@dataclass(eq=False)
class _Softmax:
    """One softmax: the flows of its logits, its result, and the call in which its products were formed too."""

    terms: Flows
    origin: Origin
    owner: _Frame
    axes: dict[Origin, set[str]]  # the letters of each product along which the softmax sums
    plain: bool  # whether its logits come from a projection, as far as they come from no product
    shape: tuple[int, ...]
    causal: bool = False

    @property
    def place(self) -> str:
        """The path of the module that it belongs to."""
        path = self.owner.path
        return path.rpartition(".")[0] if isinstance(self.owner.module, nn.Softmax) else path

    @property
    def is_usual(self) -> bool:
        """Whether it is shaped like attention, [B, H, N, M] or [B·H, N, N], which others rarely are."""
        return len(self.shape) > 3 or (len(self.shape) == 3 and self.shape[1] == self.shape[2])


@dataclass(frozen=True)
class _Operand:
    """One operand of a product."""

    sizes: dict[str, int]  # of its axes, by letter
    features: set[str] | None  # the letters along which the features of its projection change; None if not known
    factor: float | None  # of the host; None if it cannot be separated
    norm: float | None  # that all its vectors have
    seen: tuple[float, float] | None  # sums that other values do not have


_NONE = _Operand({}, None, None, None, None)


class _Search(Following):
    """Runs an example without gradients, and notes calls, products and softmaxes with what is needed to judge them.

    Args:
        model: it runs.
        known: paths of modules that are not looked into.
    """

    def __init__(self, model: nn.Module, known: Collection[str]) -> None:
        super().__init__(places=True)
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.known = known
        self.running: list[_Frame] = []
        self.frames: list[_Frame] = []
        self.calls: dict[str, Call] = {}  # by the paths of their modules
        self.products: list[Origin] = []
        self.softmaxes: list[_Softmax] = []
        self.by_hand: dict[str, str] = {}  # path -> function
        self.made = {id(x): ref(x) for x in (*model.parameters(), *model.buffers())}  # what PyTorch's functions made
        self.unseen: set[str] = set()  # paths of modules in which something else made a tensor

    def run(self, example: Any, *, changed: bool = False) -> _Search:
        """Run the model, on other values if `changed`. Random state and buffers stay as they were."""
        handles = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.paths]
        handles += [module.register_forward_hook(self._leave, always_call=True) for module in self.paths]
        if changed:
            handles.append(self.model.register_forward_pre_hook(_change, with_kwargs=True, prepend=True))
        try:
            with undisturbed(self.model), force_eager(), self:
                run_example(self.model, example)
        finally:
            for handle in handles:
                handle.remove()
        return self

    def _enter(self, module: nn.Module, inputs: Any, named: Any) -> None:
        if not self.running:
            self._make((*inputs, *named.values()))
        path = self.paths[module]
        known = path in self.known or isinstance(module, Mechanism) or bool(self.running and self.running[-1].known)
        frame = _Frame(path, module, known, (len(self.products), len(self.softmaxes)))
        self.running.append(frame)
        self.frames.append(frame)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
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
        if not self.running or is_compiling():
            return func(*args, **kwargs)
        if func in FUNCTIONS and not self.running[-1].known:
            self._call(func, args, kwargs)
        out = func(*args, **kwargs)
        self._use((*args, *kwargs.values()))
        self._make(out)
        if type(func).__module__ == "torch._ops":  # an operator of the host or of its kernels
            self._hide()
        if self.running[-1].known:
            return out
        name = name_of(func)
        if name in PRODUCTS:
            self._product(name, args, kwargs, out)
        elif name == SOFTMAX:
            self._softmax(args, kwargs, out)
        elif name in OTHER_PRODUCTS and isinstance(out, Tensor):
            self.new(out, Origin("product", name, frames=tuple(self.running)), odd=name)
        else:
            self.follow(name, func, args, kwargs, out)
            if name == "mul" and isinstance(out, Tensor):
                self._by_entries(args, out)
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> None:
        frame = self.running[-1]
        frame.calls += 1
        call = replace(FUNCTIONS[func].read(frame.path, *args, **kwargs), repeated=frame.calls > 1)
        self.calls[frame.path] = self.calls[frame.path].joined(call) if frame.path in self.calls else call

    def _by_entries(self, args: Any, out: Tensor) -> None:
        """Begin at queries times keys by entries, which a sum over features would follow; see weights times values."""
        pair = [x for x in args if isinstance(x, Tensor) and out.numel() > x.numel() > 1 and not self.is_parameter(x)]
        if len(pair) != 2:
            return
        for x in pair:
            self._spelled(x)
        if all(any(flow.origin.axis is not None for flow in self.flows(x)) for x in pair):
            origin = Origin("product", "mul", frames=tuple(self.running))
            self.new(out, origin, odd="a sum of products by entries", also=self.flows(out))

    def _spelled(self, weights: Tensor) -> None:
        """Note which function of `BY_HAND` made the weights of some values."""
        for flow in self.flows(weights):
            if flow.origin.kind == "product" and not flow.origin.is_plain and flow.odd in BY_HAND:
                self.by_hand.setdefault(flow.origin.frames[-1].path, flow.odd)

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
            if not learned[1 - i]:
                self._spelled(x)
            for flow in self.flows(x):
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
        plain = any(flow.origin.axis is not None for flow in self.flows(logits))
        made = _Softmax(terms, origin, owner, {}, plain, tuple(out.shape))
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
            for one in softmaxes:
                if one.owner is frame and one.plain and not one.terms:
                    self.left.setdefault(one.place, "its softmax is of no product of two activations")
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
            weighs = frame.begin[1] != frame.end[1] or frame.path in search.unseen
            if not weighs and looks_like_attention(frame.module):
                self.left.setdefault(frame.path, "it forms no softmax")
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


class FoundAdapter(Adapter):
    """Adapter for what is found in one way.

    Args:
        name: of the way, `UNIVERSAL` or `WRITTEN_OUT`.
        found: what was found, by the path of its module.
    """

    name: str  # type: ignore[misc]
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, name: str, found: Mapping[str, Call | Written]) -> None:
        self.name, self.found = name, found

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft of a site with a mechanism; its parameters are the same objects."""
        made: nn.Module = self.found[site.path].draft(site.module, config)
        return made

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the operands of a call or product, or None."""
        return self.found[site.path].refusal(config) or refusal(config, site.capabilities)


class Finding:
    """The modules that call an attention function of PyTorch or write attention out, and that no adapter takes.

    Args:
        model: it is not changed. What an earlier injection found in it is known from the start.
        taken: paths of the modules that adapters replace.

    Attributes:
        calls, written: what was found, by the path of its module, in the order in which they ran.
        idle: those of `taken` that did not run, in modules that call a function; such modules only lend projections.
        left: path of a module that has no softmax of q·k over tokens, by what it did -> why.
        missed: others that are like attention by their class or by a softmax, by path.
    """

    def __init__(self, model: nn.Module, taken: Collection[str] = ()) -> None:
        self.model, self.taken = model, taken
        self.modules = dict(model.named_modules())
        free = {path: module for path, module in self.modules.items() if not within(path, taken)}
        self.calls: dict[str, Call] = {p: m.found_attention for p, m in free.items() if isinstance(m, Routed)}
        self.written: dict[str, Written] = {p: m.found_attention for p, m in free.items() if isinstance(m, WrittenOut)}
        self.idle: list[str] = []
        self.left: dict[str, str] = {}
        self.missed: dict[str, nn.Module] = {}

    def run(self, example: Any, *, allow_partial: bool = False, kernels_attend: bool = True) -> None:
        """Run an example, and find what it shows.

        Args:
            example: as in :func:`quest_core.inject`.
            allow_partial: go on if attention is written out in a way that is not understood.
            kernels_attend: see :class:`quest_core.Adapter`.

        Raises:
            UnsupportedError: it is, or the calls of one module differ in the function, heads, features or scale.
        """
        known = {*self.taken, *self.written}
        search = _Search(self.model, known).run(example)
        if not kernels_attend:
            search.unseen.clear()
        judge = _Judge(search, lambda: _Search(self.model, known).run(example, changed=True))
        if judge.refused and not allow_partial:
            shown = "; ".join(
                f"'{path}' ({type(self.modules[path]).__name__}): {why}" for path, why in [*judge.refused.items()][:8]
            )
            raise UnsupportedError(f"attention that is written out is not understood: {shown}")
        ran = {frame.path for frame in search.frames}
        self.idle = [path for path in self.taken if within(path, search.calls) and path not in ran]
        self.calls |= search.calls
        self.written |= judge.sites
        self.left = judge.left
        ours = self._ours()
        kinds = {host_class(self.modules[path]) for path in self.calls}
        weigh = {one.place for one in search.softmaxes if one.is_usual}
        alike = {type(self.modules[x]) for x in judge.left} - {type(self.modules[x]) for x in (*ours, *judge.refused)}
        for path, module in self.modules.items():
            if type(module) in alike and path not in ran:
                self.left.setdefault(path, "it did not run, and others of its class have no attention")
            apart = not within(path, ours) and not any(within(other, [path]) for other in ours)
            if apart and (type(module) in kinds or path in weigh):
                self.missed[path] = module

    def sites(self) -> Iterator[tuple[Adapter, Site]]:
        """Yield what was found, each with its adapter.

        Raises:
            InjectionError: a module contains another attention, or has an attribute that a site needs.
        """
        for adapter in (FoundAdapter(UNIVERSAL, self.calls), FoundAdapter(WRITTEN_OUT, self.written)):
            for path, one in adapter.found.items():
                module = self.modules[path]
                inside = [other for other in self._ours() if within(other, [path])]
                inside.remove(path)
                if inside:
                    why = f"it contains another attention, '{inside[0]}'; move one of them into a module of its own"
                elif hasattr(module, "mechanism") and not isinstance(module, FoundSite):
                    why = "it has an attribute 'mechanism', which a site needs; rename it"
                else:
                    yield adapter, Site(path, module, one.heads, one.head_dim, one.asks, note=one.note)
                    continue
                raise InjectionError(f"'{path}' ({type(module).__name__}) {one.does}, and {why}")

    def _ours(self) -> list[str]:
        """Return the paths of all modules that become sites; one that is found in both ways is there twice."""
        return [path for path in (*self.calls, *self.written, *self.taken) if path not in self.idle]


def _change(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return other inputs of the same kind: numbers are turned around and scaled, masks stay."""

    def other(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1:
            return x.flatten().flip(0).view_as(x) * 1.3 + 0.1
        if isinstance(x, Tensor) and x.dtype != torch.bool and x.numel() > 1 and x.max() > 1:
            return x.flatten().flip(0).view_as(x)
        if isinstance(x, dict):
            return {key: other(value) for key, value in x.items()}
        return type(x)(other(y) for y in x) if type(x) in (list, tuple) else x

    return other(args), other(kwargs)
