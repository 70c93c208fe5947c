"""Follow the tensors of a model from function to function, to know what its attention is made of.

Attention that a module writes out is product → scale, bias, mask → softmax → product, spelled in any way.
:class:`Following` is a TorchFunctionMode that sees every function that PyTorch runs, and keeps for each tensor its
*flows*: from which *origin* it was made, by which number it was multiplied since, and what odd thing was done to it.

    q, k = wq(x), wk(x)             q: plain                         an activation, from a linear layer
    q = q / 8                       q: plain, factor 1/8
    s = q @ k.mT                    s: product, factor 1             an origin; the search keeps the 1/8 with it
    s = 2 * s + bias                s: product, factor 2             shifting, hiding and moving change no flow
    p = s.softmax(-1)               p: softmax                       of a product of factor 2: a scale of 1/8 · 2
    o = p @ v                       o: plain                         the weights were applied

With ``s.exp()`` before the softmax the flow of s would be *odd*, by "exp", and the module refused.

The search of an example (search.py) also keeps the *place* that each entry has in its origin, and so knows which axis
holds features, keys or heads, however they were moved (`Flow.along`):

    q = wq(x)                       places 1 to 160          [5, 32], features along axis 1
    q = q.view(5, 4, 8)             the same                 [5, 4, 8], features along axes 1 and 2: heads of 8
    q = q.transpose(0, 1)           moved as the entries     [4, 5, 8], features along axes 0 and 2

A run of a site (:class:`Comparing`) follows factors only, and compares them with those of the example. Both share the
rules below, one for each group of functions.py: `follow` chooses, `_scale` multiplies, `_pass_on` does the rest, and
`_change_base` sees what was changed in place.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat import is_eager, may_read, transform
from ..errors import UnsupportedError
from .functions import (
    ACTIVATIONS,
    BOUNDS,
    BY_HAND,
    JOINS,
    KEEPS,
    MOVES,
    MOVES_ONE,
    NO_EQUATION,
    NORMS,
    PROJECTIONS,
    SCALES,
    SHIFTS,
    SUMS,
    WRITES,
    alpha,
    entries_from,
    holds_numbers,
    is_far,
    map_tensors,
    name_of,
    number,
    tensors,
)

# What makes a flow odd, besides the functions that do, which it names:
LEARNED = "a learned factor"
MULTIPLES = "a sum of its multiples"
TENSOR = "a tensor of factors"
NO_TENSORS = (int, float, torch.dtype, torch.device, torch.Size)  # as tensor.shape returns
SAME = 1e-5  # relative difference of factors that are one
ROUNDED = 2**-7  # the same where a tensor of bfloat16 rounds them


@dataclass(eq=False)
class Origin:
    """What a followed tensor was made from; a search fills in the last fields, from `learned` on."""

    kind: str  # "product" of two tensors; "softmax"; "parameter"; "plain": any other activation
    number: int = -1  # how many products were formed before this one; -1 for those by entries and `OTHER_PRODUCTS`
    equation: tuple[str, str, str] = NO_EQUATION  # letters of the axes of both operands and of the result: nd, dm, nm
    shape: tuple[int, ...] = ()  # of the result
    axis: int | None = None  # that of features; of a softmax, its own; None if it is not known
    learned: tuple[bool, ...] = ()  # which operands of a product are parameters
    operands: tuple[Any, ...] = ()  # what is known of both operands
    mixes: "tuple[Origin, ...]" = ()  # the products of which this linear layer mixes the logits
    multiplied: bool = False  # its entries were multiplied by a tensor of zeros and ones
    frames: tuple[Any, ...] = ()  # the modules that were running
    softmaxes: list[Any] = field(default_factory=list)  # that were taken of this product
    uses: list[str] = field(default_factory=list)  # of weights: "applied" to values, "by entries" or "kept"
    # One entry for each function that took logits as they were formed or moved: its factor on them, or None.
    takers: list[float | None] = field(default_factory=list)

    @property
    def is_logits(self) -> bool:
        """Whether it is a product of two activations, which may be the logits of attention."""
        return self.kind == "product" and not any(self.learned)

    @property
    def is_activation(self) -> bool:
        """Whether it is any other activation, such as a product with a parameter, which is a projection."""
        return self.kind == "plain" or any(self.learned)


ACTIVATION = Origin("plain")
"""The origin of an activation of which nothing is known but its factor."""
BY_ENTRIES = Origin("product")
"""The key of all products without a number."""


class Flow(NamedTuple):
    """How a tensor was made from an origin."""

    origin: Origin
    factor: float = 1.0  # by which it was multiplied since
    odd: str | None = None  # the first that did more than to move, scale, shift or hide entries, in words of errors
    places: Tensor | None = None  # 1 + the place of each entry in the origin, 0 for one from elsewhere; None: unknown
    frames: tuple[Any, ...] = ()  # the modules that ran when it began, or was last multiplied by a number
    shifted: bool = False  # the largest logit of each row, or the like, was subtracted
    capped: bool = False  # logits went through a tanh, between two parts of the factor
    bent: bool = False  # one of `ACTIVATIONS` was applied since
    gate: float = 1.0  # the share of the factor in tensors of one entry, which may be gates in a batch of one
    part: bool = False  # in a sum or join, some parts have a factor, and others have not; `factor` is 1 again there

    def marked(self, why: str | None) -> "Flow":
        """Return the flow after something odd; the first reason stays."""
        return self._replace(odd=why) if why and self.odd is None else self

    def partial(self) -> "Flow":
        """Return the flow of a sum or a join, of whose parts one has this factor, and another has not."""
        return self._replace(part=True, factor=1.0) if self.odd is None else self

    def times(self, by: float) -> "Flow":
        """Return the flow after a multiplication."""
        return self._replace(factor=self.factor * by)

    def widened(self, shape: torch.Size) -> "Flow":
        """Return the flow with its places repeated to a shape."""
        if self.places is None or self.places.shape == shape:
            return self
        try:
            return self._replace(places=self.places.expand(shape))
        except RuntimeError:
            return self._replace(places=None)

    @property
    def along(self) -> set[int] | None:
        """The axes of the tensor along which the axis of its origin runs, that of features or keys; None: unknown."""
        if self.places is None or self.origin.axis is None:
            return None
        return {dim for dim in range(self.places.dim()) if self.origin.axis in varying(self, dim)}


Flows = tuple[Flow, ...]
Given = list[tuple[Tensor, Flows]]


class Step(NamedTuple):
    """One function that a model called."""

    name: str
    func: Any
    args: Any
    kwargs: Any
    given: Given  # the tensors whose entries it takes, with their flows


class Following(TorchFunctionMode):
    """Notes the flows of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Any] = []  # modules, if it is a search
        self.followed: dict[int, tuple[ref[Tensor], Flows]] = {}

    def flows(self, x: Any) -> Flows:
        """Return what is known of a tensor; () for others."""
        found = self.followed.get(id(x))
        return found[1] if found is not None and found[0]() is x else ()

    def knows(self, values: Any) -> bool:
        """Return whether one of some arguments is followed."""
        if known := self.followed:
            for x in values:
                found = known.get(id(x))
                if (found is not None and found[0]() is x) or (type(x) in (list, tuple) and self.knows(x)):
                    return True
        return False

    def note(self, x: Any, flows: Flows) -> None:
        """Remember from what `x` was made, as long as it lives."""
        if flows:
            self.followed[id(x)] = ref(x), flows
        else:
            self.followed.pop(id(x), None)

    def follow(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note from what the results `out` of ``func(*args, **kwargs)``, which is called `name`, were made."""
        if "input" in kwargs:  # the first argument comes first
            kwargs = {"input": kwargs["input"], **kwargs}
        out = args[0] if name == "setitem" else out
        given = [(x, self.flows(x)) for x in entries_from(name, args, kwargs)]
        if numbers := [flows for x, flows in given if holds_numbers(x)]:
            # A mask or an index concerns the numbers that it was made from, no others.
            own = {f.origin for flows in numbers for f in flows}
            given = [(x, tuple(f for f in flows if f.origin in own)) for x, flows in given]
        step = Step(name, func, args, kwargs, given)
        if name in SCALES:
            self._scale(step, out)
        elif name not in PROJECTIONS and any(flows for _, flows in given):
            results = [*tensors((out,))]
            if results and name not in MOVES_ONE:
                take(flow for _, flows in given for flow in flows)
            for nth, result in enumerate(results):
                self.note(result, self._pass_on(step, result, nth))
        else:
            return
        self._change_base(step, out)

    def addends(self, head: list[Any], rest: dict[str, Any]) -> Flows:
        """Return the flows of what baddbmm or addmm adds to its product; arguments as `operands` returns them."""
        beta = float(rest.get("beta", 1.0))
        flows = self.flows(head[0]) if head and beta else ()
        return tuple(f.times(beta) for f in flows if f.origin.kind == "product")

    def is_parameter(self, x: Any) -> bool:
        """Return whether a tensor is a parameter, or was made from parameters only."""
        flows = self.flows(x)
        return is_learned(x) or (bool(flows) and all(f.origin.kind == "parameter" for f in flows))

    def _scale(self, step: Step, out: Tensor) -> None:
        """Follow a product or quotient of entries: of `x` by `factors`, a number or a tensor."""
        x, factors = (*step.args, *step.kwargs.values())[:2]
        if step.name == "mul" and self._is_factor(x, factors, out):
            x, factors = factors, x
        learned = self.is_parameter(factors)
        factor = None if self.flows(factors) and not learned else number(factors)
        if not isinstance(x, Tensor):  # a number, divided by a tensor
            changed = []
        elif factor is None or (factor == 0 and step.name == "div"):
            changed = self._scale_entries(step, x, factors, out, learned=learned)
        else:
            flows = self.flows(x)
            if not flows and out.is_floating_point():
                flows = (Flow(Origin("parameter") if self.is_parameter(x) else ACTIVATION),)
            by = factor if step.name == "mul" else 1 / factor
            gate = by if self._may_gate(factors) else 1.0
            take(flows, by if len(flows) == 1 and not step.kwargs else None)
            why, frames = LEARNED if learned else None, tuple(self.running)
            changed = [f.times(by).marked(why)._replace(gate=f.gate * gate, frames=frames) for f in flows]
        self.note(out, _merge([f.widened(out.shape) for f in changed]))

    def _scale_entries(self, step: Step, x: Tensor, factors: Any, out: Tensor, *, learned: bool) -> list[Flow]:
        """Return what is left of the flows of `x` and of `factors` in a product or quotient with a tensor."""
        flows, others = self.flows(x), self.flows(factors)
        take((*flows, *others))
        changed: list[Flow] = []
        for flow in flows:
            if _weighs_values(flow, x, others, out):
                flow.origin.uses.append("by entries")
                continue
            flow.origin.multiplied |= flow.origin.is_logits
            changed.append(flow.marked(self._oddity(flow, x, factors, learned=learned)))
        own = {f.origin for f in flows}
        for flow in others:
            if _shifts_only(flow, factors, flows, out):
                continue
            if flow.origin not in own and _weighs_values(flow, factors, flows, out):
                flow.origin.uses.append("by entries")
                continue
            is_logits = flow.origin.is_logits and (holds_numbers(factors) or flow.origin in own)
            if is_logits or flow.origin.kind == "softmax":
                changed.append(flow._replace(odd=TENSOR if step.name == "mul" else flow.odd or "a quotient"))
        return changed

    def _oddity(self, flow: Flow, x: Tensor, factors: Any, *, learned: bool) -> str | None:
        """Return what makes a flow of `x` odd that is multiplied or divided by `factors`, or None."""
        if flow.origin.is_logits and isinstance(factors, Tensor) and (learned or not self._is_mask(factors)):
            return LEARNED if learned else TENSOR
        if factors is x:
            return "square"
        if flow.origin.is_activation and self._is_by_head(factors, flow):
            return TENSOR
        if flow.factor != 1 and any(f.origin is not ACTIVATION for f in self.flows(factors)):
            return "a factor, and a product after it"
        return None

    def _is_factor(self, one: Any, other: Any, out: Tensor) -> bool:
        """Return whether in a product of entries `other` is the tensor to follow, and `one` a factor on it."""
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return not isinstance(one, Tensor)
        for small, large in ((one, other), (other, one)):
            # A tensor that is repeated for another is a table or a number, whatever made it. A run knows of an
            # activation only that it was scaled; a search knows of its projection too.
            if small.shape != out.shape == large.shape and all(f.origin is ACTIVATION for f in self.flows(small)):
                return small is one
        if self.is_parameter(one) != self.is_parameter(other):  # weights on an activation
            return self.is_parameter(one)
        return bool(self.flows(other) and not self.flows(one))

    def _may_gate(self, x: Any) -> bool:
        """Return whether a factor of one entry may be the gate of a batch of one; a search follows gates itself."""
        return False

    def _is_mask(self, x: Any) -> bool:
        """Return whether a tensor that multiplies logits only hides some, as a mask does."""
        return True

    def _is_by_head(self, x: Any, flow: Flow) -> bool:
        """Return whether a tensor multiplies an activation by one number, or one for each head."""
        places = flow.places
        if places is None or not isinstance(x, Tensor) or not may_read(x) or self._is_mask(x):
            return False
        if (x.dim() and x.shape[-1] > 1) if self.is_parameter(x) else self.flows(x):
            return False
        repeats = torch.broadcast_shapes(x.shape, places.shape) != places.shape  # the activation
        if repeats or (along := flow.along) is None:
            return False
        x = x.expand(places.shape)
        return all(bool((x == x.narrow(dim, 0, 1)).all()) for dim in {*range(x.dim()), -1} - along)

    def _pass_on(self, step: Step, out: Tensor, nth: int) -> Flows:
        """Return what a function that does not multiply leaves of the flows of its arguments in its `nth` result."""
        name, given = step.name, step.given
        flows = [flow for _, flows in given for flow in flows]
        if not holds_numbers(out):
            return _merge([_unknown(f, name)._replace(places=None) for f in flows if f.origin.is_logits])
        if name in BOUNDS and is_far(step.args, step.kwargs):
            name = "identity"
        if name in SUMS and len(given) > 1:
            flows = _sum(step)
        if any(x.is_floating_point() and not self.is_parameter(x) for x, _ in given):  # an activation is the result
            flows = [flow for flow in flows if flow.origin.kind != "parameter"]
        if _mixes_factors(name, given):
            flows = [f.partial() if f.origin.is_activation else f for f in flows]
        if name in MOVES:
            flows.sort(key=lambda f: f.places is None)
            places = {f.origin: self._move(step, f.origin, nth) for f in flows if f.places is not None}
            return _merge([f._replace(places=places.get(f.origin)) for f in flows])
        if name in ("neg", "rsub"):
            flows = [f.times(-1) for f in flows]
        elif name in KEEPS:
            # Statistics that shift an activation do not count.
            kept = {f.origin for x, own in given for f in own if not any(_shifts_only(f, x, o, out) for _, o in given)}
            flows = [f for f in flows if f.origin in kept]
        else:
            flows = [_unknown(_keep_features(f, out), name) for f in flows]
        return _merge([f.widened(out.shape) for f in flows])

    def _move(self, step: Step, origin: Origin, nth: int) -> Tensor | None:
        """Return the places in the `nth` result of a function that moves entries; None if it does not move integers."""

        def places(x: Tensor) -> Any:
            if not holds_numbers(x):
                return x
            found = [f.places for f in self.flows(x) if f.origin is origin]
            return found[0] if found else torch.zeros(x.shape, dtype=torch.int32)

        try:
            args, kwargs = map_tensors(step.args, places), map_tensors(step.kwargs, places)
            if step.name == "pad":
                return torch.nn.functional.pad(args[0], kwargs.get("pad", args[1] if len(args) > 1 else None))
            if step.name == "setitem":
                target, at, value = args
                if isinstance(value, Tensor):
                    target = target.clone()
                    target[at] = value
                return target  # type: ignore[no-any-return]
            return list(tensors((step.func(*args, **kwargs),)))[nth]
        except (AttributeError, RuntimeError, TypeError, IndexError):
            return None

    def _change_base(self, step: Step, out: Any) -> None:
        """Mark the tensors that share memory with one that was changed in place, unless it was only shifted or hidden.

        They are the tensor of which it is a part, and others with some of its entries.
        """
        target = step.args[0] if step.args else None
        if out is not target or not isinstance(target, Tensor):
            return
        base, changes = target._base, step.name not in KEEPS and step.name != "setitem"
        written = [f for x, flows in step.given[1:] if x is not target for f in flows]
        if base is not None and (written or (changes and self.flows(base))):
            written = [f._replace(places=None) for f in written]
            flows = _merge([*self.flows(base), *written])
            if step.name in WRITES and all(f.origin.is_activation and factor_of((f,)) == 1 for f in flows):
                self.note(base, tuple(f._replace(places=None) for f in flows))  # a cache
            elif step.name in SUMS and _products(self.flows(base)) and not _products(tuple(written)):
                self.note(base, flows)  # logits of which a part gets a bias
            else:
                self._mark(base, flows, step.name)
        for x in [made() for made, _ in [*self.followed.values()]] if changes else ():
            if x is not None and x is not target and x is not base and _overlap(x, target):
                self._mark(x, self.flows(x), step.name)

    def _mark(self, x: Tensor, flows: Flows, name: str) -> None:
        self.note(x, tuple(f.marked(f"{name} of a part")._replace(places=None) for f in flows))


class Comparing(Following):
    """Follows the forward of a site in eager code, to compare it with the example.

    Args:
        site: see `FoundSite`.
        eager: False follows nothing, as while compiling.
    """

    def __init__(self, site: Any, *, eager: bool = True) -> None:
        super().__init__()
        self.site, self.eager = site, eager and is_eager()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function that is not the attention."""
        # The one method that Dynamo reads only as a method.
        out = args[0].unflatten(*args[1:], **kwargs) if func is Tensor.unflatten else func(*args, **kwargs)
        if self.eager and not isinstance(out, NO_TENSORS):
            name = name_of(func)
            if name in SCALES or self.knows(args) or (kwargs and self.knows(kwargs.values())):
                self.follow(name, func, args, kwargs, out)
        return out

    def follow(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Follow; most steps move one tensor, or shift or hide logits, and need none of the other rules."""
        if not kwargs and isinstance(out, Tensor) and out is not args[0] and out.is_floating_point():
            place = int(name == "where")
            flows = self.flows(args[place])
            keeps = name in KEEPS and name != "neg" and all(flow.origin.number >= 0 for flow in flows)
            if flows and (keeps or name in MOVES_ONE) and not self.knows((*args[:place], *args[place + 1 :])):
                if name not in MOVES_ONE:
                    take(flows)
                self.note(out, flows)
                return
        super().follow(name, func, args, kwargs, out)

    def _may_gate(self, x: Any) -> bool:
        if not isinstance(x, Tensor):
            return False
        return all(x is not own for own in (*self.site.parameters(), *self.site.buffers()))

    def refuse(self, what: str) -> NoReturn:
        """Raise UnsupportedError, because the site does something else than in the example."""
        raise UnsupportedError(
            f"'{self.site.found_attention.path}' {what}; its attention is not written as in the example with which "
            f"'{self.site.mechanism.config}' was injected. Call uninject, and inject with an example of this kind"
        )

    def compare_factors(self, operands: Iterable[Tensor], factors: Iterable[float]) -> None:
        """Raise UnsupportedError if the host multiplies queries or keys by other factors than in the example."""
        for x, factor, what in zip(operands, factors, ("queries", "keys"), strict=False):
            given = factor_of(self.flows(x), sums=True)
            if given is None and factor == 1:
                continue  # nothing is undone
            if given is None:
                self.refuse(f"multiplies its {what} by a number and changes them after that, unlike in the example")
            gate = next((flow.gate for flow in self.flows(x) if flow.origin.is_activation), 1.0) or 1.0
            if not any(same_factor(one, factor, rounded=x.element_size() < 4) for one in (given, given / abs(gate))):
                self.refuse(f"multiplies its {what} by {given:g}, and in the example by {factor:g}")


def same_factor(one: float, other: float, *, rounded: bool) -> bool:
    """Return whether two factors are one; `rounded` if a half type may have rounded one of them."""
    return math.isclose(one, other, rel_tol=ROUNDED if rounded else SAME)


# --- rules of flows ---------------------------------------------------------------------------------------------------


def factor_of(flows: Flows, *, sums: bool = False) -> float | None:
    """Return the factor of an activation or parameter, 1 if none is known, None if it is unclear.

    It is unclear where only a part of a sum or join has a factor; `sums` returns the factor on the whole then.
    """
    plain = [f for f in flows if f.origin.is_activation] or [f for f in flows if f.origin.kind != "softmax"]
    if not plain:
        return 1.0
    return None if plain[0].odd or (plain[0].part and not sums) else abs(plain[0].factor)


def take(flows: Iterable[Flow], by: float | None = None) -> None:
    """Note on the origins of logits that a function took them, and multiplied them `by` a number."""
    for flow in flows:
        if flow.origin.is_logits and flow.factor == 1:
            flow.origin.takers.append(by)


def counted(flows: Iterable[Flow]) -> tuple[Origin, ...]:
    """Return the logits that have a number, so no products by entries."""
    return tuple(f.origin for f in flows if f.origin.is_logits and f.origin.number >= 0)


def _products(flows: Flows) -> set[Origin]:
    """Return the logits from which a tensor was made."""
    return {flow.origin for flow in flows if flow.origin.is_logits}


def _merge(flows: list[Flow]) -> Flows:
    """Return each origin once; activations count as one, and so do products without a number.

    Parameters count only if nothing else is there.
    """
    found: dict[Origin, Flow] = {}
    for flow in flows:
        if flow.origin.kind == "parameter":
            continue
        key = ACTIVATION if flow.origin.is_activation else flow.origin
        if key.kind == "product" and key.number < 0:
            key = BY_ENTRIES
        first = found.setdefault(key, flow)
        if key is not ACTIVATION:
            same = (first.factor, first.capped) == (flow.factor, flow.capped)
            odd = first.odd or flow.odd or (None if same else MULTIPLES)
            found[key] = first._replace(odd=odd)
        elif not _same(first.factor, flow.factor):
            found[key] = first.partial()
    plain = [found.pop(ACTIVATION)] if ACTIVATION in found else []
    return (*found.values(), *plain) or tuple(flows[:1])


def _unknown(flow: Flow, name: str) -> Flow:
    """Return a flow through a function that is not known: activations go on, logits and factors are lost."""
    goes_on = flow.origin.is_activation or flow.origin.kind == "parameter"
    if goes_on and flow.factor == 1 and name not in NORMS:
        return flow._replace(bent=True) if name in ACTIVATIONS else flow
    if name == "tanh" and flow.origin.is_logits and not flow.capped:
        return flow._replace(capped=True)
    if name in BY_HAND and flow.origin.kind == "product" and flow.origin.number < 0:  # its `odd` only names the product
        return flow._replace(odd=name)
    return flow.marked(name)


def _sum(step: Step) -> list[Flow]:
    """Return the flows of two tensors in their sum or difference."""
    (_, first), (other, second) = step.given[:2]
    if other.shape[-1:] in ((), (1,)) and any(f.odd in SHIFTS for f in second):
        first = tuple(f._replace(shifted=True) for f in first)
        second = tuple(f for f in second if f.odd not in SHIFTS)
    by = alpha(step.kwargs) * (-1 if step.name == "sub" else 1)
    both = _products(first) & _products(second)
    flows = [*first, *(f.times(by) for f in second)]
    return [f.marked(MULTIPLES) if f.origin in both else f for f in flows]


def _mixes_factors(name: str, given: Given) -> bool:
    """Return whether a sum or a join has a scaled activation, and a number or a tensor without its factor."""
    if name == "where":
        given = [(x, flows) for x, flows in given if x.is_floating_point()]
    elif name not in (*JOINS, "setitem", "add", "sub"):
        return False
    scaled = (f.factor for _, flows in given for f in flows if f.origin.is_activation and f.factor != 1)
    if (factor := next(scaled, None)) is None:
        return False
    if len(given) < 2:
        return name != "where"  # which hides entries then
    return any(not any(_same(f.factor, factor) for f in flows) for _, flows in given)


def _same(one: float, two: float) -> bool:
    return math.isclose(abs(one), abs(two))


# --- weights ----------------------------------------------------------------------------------------------------------


def _are_activation(flows: Flows, origin: Origin) -> bool:
    """Return whether a tensor is an activation, which `origin` is not a part of."""
    return any(f.origin.is_activation for f in flows) and all(f.origin is not origin for f in flows)


def _is_smaller(x: Tensor, out: Tensor) -> bool:
    """Return whether a tensor is repeated for `out`, or was before."""
    return x.numel() < out.numel() or (
        x.layout == torch.strided and any(step == 0 for step, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    )


def _shifts_only(flow: Flow, x: Tensor, others: Flows, out: Tensor) -> bool:
    """Return whether `x` only shifts or gates an activation, which becomes neither weights nor logits by that.

    It does if it holds statistics, which are numbers made from weights or from a product by entries, such as means.
    """
    if flow.origin.kind == "product":
        is_statistic = flow.origin.number < 0
    else:
        is_statistic = flow.origin.kind == "softmax" and flow.places is None
    return is_statistic and _is_smaller(x, out) and _are_activation(others, flow.origin)


def _weighs_values(flow: Flow, x: Tensor, others: Flows, out: Tensor) -> bool:
    """Return whether a product by entries applies weights `x` to values; then they are weights no more.

    Values differ along keys; a table that is as long only on axes before them is none.
    """
    if flow.origin.kind != "softmax" or not _is_smaller(x, out):
        return False
    places, ends = flow.places, True
    if places is not None and places.dim() == out.dim() and not _are_activation(others, flow.origin):
        keys = flow.along
        ends = not keys or places.shape[min(keys) :] != out.shape[min(keys) :]
    return ends


# --- places and memory ------------------------------------------------------------------------------------------------


def varying(flow: Flow, dim: int) -> set[int]:
    """Return the axes of the origin along which places change along the axis `dim` of the tensor."""
    assert flow.places is not None
    shape = flow.origin.shape
    rows = flow.places.movedim(dim, -1)[None]
    count = math.prod(rows.shape[:-1])
    some = torch.arange(0, count, max(count // 512, 1))  # enough of them, taken before any is copied
    rows = rows[torch.unravel_index(some, rows.shape[:-1])]
    real, found = rows > 0, set()
    for axis, size in enumerate(shape):
        place = (rows - 1).div(math.prod(shape[axis + 1 :]), rounding_mode="floor") % size
        most, least = place.masked_fill(~real, -1).amax(-1), place.masked_fill(~real, size).amin(-1)
        if bool((most > least).any()):
            found.add(axis)
    return found


def _keep_features(flow: Flow, out: Tensor) -> Flow:
    """Return the flow of an activation of whose tokens a function has made others, as pooling does.

    Features are where they were if their axes are as long, and the others are as many.
    """
    places = flow.places
    if not flow.origin.is_activation or places is None or places.shape == out.shape or places.dim() != out.dim():
        return flow
    if (along := flow.along) is None or any(places.shape[dim] != out.shape[dim] for dim in along):
        return flow
    for dim in {*range(out.dim())} - along:
        places = places.narrow(dim, 0, 1)
    return flow._replace(places=places.expand(out.shape))


def is_learned(x: Any) -> bool:
    """Return whether `x` is a parameter; a number or a mask that is kept as one but is not trained is none."""
    return isinstance(x, nn.Parameter) and (x.requires_grad or (x.numel() > 1 and holds_numbers(x)))


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors have entries of one storage in common; False where no storage can be read."""
    if transform() or not all(may_read(x) and x.layout == torch.strided for x in (one, two)):
        return False
    if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr():
        return False
    if one.dtype != two.dtype or (one.storage_offset(), one.numel()) == (two.storage_offset(), two.numel()):
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    first, second = (taken.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (one, two))
    first.fill_(True)
    return bool(second.any())
