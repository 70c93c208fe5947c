"""Follow products of two tensors through the functions of PyTorch that a model calls.

Attention that a module writes out is product → scale, bias, mask → softmax → product. :class:`Following` is a
TorchFunctionMode that notes for each tensor from which products it was made, by which number they were multiplied, and
the first function on the way that does more than to move, scale, shift or hide entries.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat import is_eager, may_read, transform, until_changed
from ..errors import UnsupportedError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _words(
    "view reshape permute transpose swapaxes swapdims movedim moveaxis flatten unflatten squeeze unsqueeze expand "
    "expand_as getitem narrow select chunk split tensor_split unbind t T mT H adjoint contiguous clone detach repeat "
    "repeat_interleave tile roll flip index_select view_as reshape_as broadcast_to diagonal unfold cat concat "
    "concatenate stack gather take_along_dim pad alias as_strided"
)
"""Functions that only move entries."""
KEEPS = _words(
    "add sub neg masked_fill where to float double half bfloat16 type type_as cpu cuda dropout alpha_dropout "
    "nan_to_num tril triu view_as_complex view_as_real identity"
)
"""Functions that shift, hide or drop entries, or change their type."""
BY_HAND = _words("exp exp2 log_softmax gumbel_softmax softmin")
"""Functions that are half a softmax, or another one."""
PRODUCTS = {
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmm": ("input", "mat1", "mat2"),
    "einsum": ("equation",),
}
"""Functions that multiply two tensors, with the names of their first arguments."""
SOFTMAX = "softmax"
FUNCTIONS: dict[Any, str] = {
    getattr(owner, name): name
    for name in (*PRODUCTS, SOFTMAX)
    for owner in (torch, Tensor, nn.functional)
    if hasattr(owner, name)
} | {
    Tensor.__matmul__: "matmul",
    Tensor.baddbmm_: "baddbmm",
    Tensor.addmm_: "addmm",
    torch.linalg.matmul: "matmul",
    torch.special.softmax: SOFTMAX,
}
"""Products and softmaxes, by function: the only ones that are read while compiling."""
JOINS = _words("cat concat concatenate stack")
OTHER_PRODUCTS = _words(
    "tensordot inner addbmm bilinear multi_dot chain_matmul cdist cosine_similarity linalg_vecdot mv"
)
PROJECTIONS = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4} | {
    f"conv_transpose{n}d": -1 - n for n in (1, 2, 3)
}
"""Functions that multiply by weights, with the axis of the features that they return."""
ALIASES = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"} | {
    prefix + name: name.replace("true", "") for name in ("add", "sub", "mul", "div", "truediv") for prefix in "ir"
}
ALIASES |= {"rsub": "rsub", "rdiv": "rdiv", "rtruediv": "rdiv"}
_names: dict[Any, str] = {**FUNCTIONS}  # what `name_of` has answered
SCALES = ("mul", "div")
LEARNED = "a learned factor"
PART = "a factor on a part"
MULTIPLES = "a sum of its multiples"
TENSOR = "a tensor of factors"
NORMS = _words("norm vector_norm linalg_vector_norm square pow")
WRITES = _words("copy index_copy scatter")
"""Functions that write entries of another tensor into a part of one."""
NEUTRAL = 1e3  # bounds beyond it do not change logits
SAME = 1e-5  # relative difference of factors that are one
ROUNDED = 2**-7  # the same where a tensor of bfloat16 rounds them


def name_of(func: Any) -> str:
    """Return the name of a function, method or property of tensors, one for ``a * b``, ``a *= b`` and torch.mul."""
    if (name := _names.get(func)) is None:
        name = getattr(func, "__name__", "")
        name = (func.__self__.__name__ if name == "__get__" else name).strip("_")
        name = _names[func] = ALIASES.get(name, name)
    return name


NO_EQUATION = ("", "", "")
"""That of a product of vectors, or of more than two tensors."""


@dataclass(eq=False)
class Origin:
    """What a followed tensor was made from; a search fills in the last fields, from `learned` on."""

    kind: str  # "product", of two tensors; "softmax"; "parameter"; "plain" for any other activation
    name: str  # of the function
    number: int = -1  # how many products were formed before this one
    equation: tuple[str, str, str] = NO_EQUATION  # letters of the axes of both operands and of the result: nd, dm, nm
    shape: tuple[int, ...] = ()  # of the result
    axis: int | None = None  # that of features; of a softmax, its own; None if it is not known
    learned: tuple[bool, ...] = ()  # which operands of a product are parameters
    operands: tuple[Any, ...] = ()  # what is known of both operands
    mixes: tuple[Origin, ...] = ()  # the products of which this linear layer mixes the logits
    multiplied: bool = False  # its entries were multiplied by a tensor of zeros and ones
    frames: tuple[Any, ...] = ()  # the modules that were running
    # Of a softmax, how its weights were used: "applied" to values, "by entries" or "kept". Of a product, its softmaxes.
    uses: list[Any] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether it is an activation that is not a product of two activations."""
        return self.kind == "plain" or any(self.learned)


ACTIVATION = Origin("plain", "")
"""The origin of an activation of which nothing is known but its factor."""


class Flow(NamedTuple):
    """How a tensor was made from an origin."""

    origin: Origin  # the product, softmax, parameter or projection
    factor: float = 1.0  # by which it was multiplied since
    odd: str | None = None  # the first function that did more than to move, scale, shift or hide entries
    entries: Tensor | None = None  # 1 + the place of each entry in the origin, 0 for one from elsewhere; None: unknown
    frames: tuple[Any, ...] = ()  # the modules that were running when it was last multiplied by a number
    shifted: bool = False  # the largest logit of each row, or the like, was subtracted
    gate: float = 1.0  # the part of the factor in tensors of one entry, which may be gates in a batch of one


Flows = tuple[Flow, ...]


class Following(TorchFunctionMode):
    """Notes from which products, by which factors, each tensor was made.

    With `places` it follows each entry to its place too, and parameters and projections, as a search does.
    """

    def __init__(self, *, places: bool = False) -> None:
        super().__init__()
        self.places = places
        self.running: list[Any] = []  # modules, if it is a search
        self.number = 0  # of products so far
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

    def new(self, x: Tensor, origin: Origin, factor: float = 1.0, odd: str | None = None, also: Flows = ()) -> None:
        """Remember that `x` is the result of `origin`, and was made from `also` besides."""
        index = None
        if self.places and origin.kind != "parameter" and not x.is_nested:
            index = _all_places(x)
        origin.shape = tuple(x.shape)
        self.note(x, (Flow(origin, factor, odd, index, tuple(self.running)), *also))

    def follow(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note from what the results `out` of ``func(*args, **kwargs)``, which is called `name`, were made."""
        if name.endswith("_like") or name.startswith("new_"):
            return
        kwargs = {key: kwargs[key] for key in sorted(kwargs, key="input".__ne__)}  # the first argument comes first
        given = (args[0],) if name.endswith("_as") or name == "to" else (*args, *kwargs.values())
        found = list(tensors(given))
        if name == "setitem":
            found = [x for x in (args[0], args[2]) if isinstance(x, Tensor)]
            out = args[0]
        known = [(x, self.flows(x)) for x in found]
        if any(map(_holds_numbers, found)):  # a mask or an index concerns the logits that it was made from, no others
            own = {f.origin for x, flows in known if _holds_numbers(x) for f in flows}
            known = [
                (x, flows if _holds_numbers(x) else tuple(f for f in flows if f.origin in own)) for x, flows in known
            ]
        results = list(tensors((out,)))
        if name in PROJECTIONS:
            if self.places:
                self._project(name, known, out)
        elif name in SCALES:
            self._scale(name, args, kwargs, known, out)
            if self.places and not self.flows(out) and _only_parameters(found):
                self.new(out, Origin("parameter", name))
        elif any(flows for _, flows in known):
            for place, result in enumerate(results):
                if _holds_numbers(result):
                    flows = self._pass_on(name, func, args, kwargs, known, result, place)
                else:
                    logits = [f for _, flows in known for f in flows if f.origin.kind == "product"]
                    flows = _merge([_odd(f, name)._replace(entries=None) for f in logits])
                self.note(result, flows)
            self._change_base(name, args, known, out)
        elif self.places and _only_parameters(found):
            for result in results:
                self.new(result, Origin("parameter", name))

    def addends(self, head: list[Any], rest: dict[str, Any]) -> Flows:
        """Return the flows of what baddbmm or addmm adds to its product; arguments as `operands` returns them."""
        beta = float(rest.get("beta", 1.0))
        flows = self.flows(head[0]) if head and beta else ()
        return tuple(f._replace(factor=f.factor * beta) for f in flows if f.origin.kind == "product")

    def is_parameter(self, x: Any) -> bool:
        """Return whether a tensor is a parameter, or was made from parameters only."""
        flows = self.flows(x)
        return _is_learned(x) or (bool(flows) and all(f.origin.kind == "parameter" for f in flows))

    def _project(self, name: str, known: list[tuple[Tensor, Flows]], out: Tensor) -> None:
        """Begin at a linear layer or convolution, and remember which logits or weights it mixes."""
        flows = [flow for _, flows in known for flow in flows]
        mixes = counted(flows)
        axis = PROJECTIONS[name] % out.dim()
        weights = [f for f in flows if f.origin.kind == "softmax"]
        mixed = [_mix(f, axis, out) for f in weights]
        for flow, kept in zip(weights, mixed, strict=True):
            flow.origin.uses += ["applied"] if kept is None else []
        self.new(out, Origin("plain", name, axis=axis, mixes=mixes), also=tuple(f for f in mixed if f is not None))

    def _scale(self, name: str, args: Any, kwargs: Any, known: list[tuple[Tensor, Flows]], out: Tensor) -> None:
        """Follow a product or quotient of entries."""
        one, other = (*args, *kwargs.values())[:2]
        if name == "mul" and self._is_factor(one, other, out):
            one, other = other, one
        flows = self.flows(one)
        learned = self.is_parameter(other)
        factor = None if self.flows(other) and not learned else number(other)
        changed: list[Flow] = []
        if factor is not None and isinstance(one, Tensor) and (factor != 0 or name == "mul"):
            if not flows and not self.is_parameter(one) and out.is_floating_point():
                flows = (Flow(ACTIVATION),)
            times = factor if name == "mul" else 1 / factor
            why = LEARNED if learned else None
            frames, gate = tuple(self.running), times if self._may_gate(other) else 1.0
            changed = [
                _odd_flow(f._replace(factor=f.factor * times, gate=f.gate * gate, frames=frames), why) for f in flows
            ]
        elif isinstance(one, Tensor):
            changed = self._scale_entries(name, one, other, out, learned=learned)
        self.note(out, _merge([_widen(f, out) for f in changed]))
        self._change_base(name, args, known, out)

    def _scale_entries(self, name: str, one: Tensor, other: Any, out: Tensor, *, learned: bool) -> list[Flow]:
        """Return what a product or quotient of entries leaves of the flows of both: weights that it applies end."""
        flows, changed = self.flows(one), list[Flow]()
        for flow in flows:
            kind, why = flow.origin.kind, None
            if kind == "softmax" and _applies(flow, one, self.flows(other), out):
                flow.origin.uses.append("by entries")
                continue
            frozen = isinstance(other, nn.Parameter) and not other.requires_grad
            trained = learned and not frozen
            flow.origin.multiplied |= kind == "product"
            if kind == "product" and isinstance(other, Tensor) and (trained or not self._hides(other)):
                why = LEARNED if learned else TENSOR
            elif other is one:
                why = "square"
            elif kind == "plain" and self._is_by_head(other, flow):
                why = TENSOR
            elif flow.factor != 1 and any(f.origin is not ACTIVATION for f in self.flows(other)):
                why = "a factor, and a product after it"
            changed.append(_odd_flow(flow, why))
        own = {f.origin for f in flows}
        for flow in self.flows(other):
            kind = flow.origin.kind
            if _is_statistic(flow, other, out) and _are_activation(flows, flow.origin):
                continue
            if kind == "softmax" and flow.origin not in own and _applies(flow, other, flows, out):
                flow.origin.uses.append("by entries")
            elif kind == "softmax" or (kind == "product" and (_holds_numbers(other) or flow.origin in own)):
                changed.append(flow._replace(odd=flow.odd or "a quotient" if name == "div" else TENSOR))
        return changed

    def _is_factor(self, one: Any, other: Any, out: Tensor) -> bool:
        """Return whether in a product of entries `other` is the tensor to follow, and `one` a factor on it."""
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return not isinstance(one, Tensor)
        for small, large in ((one, other), (other, one)):
            # A tensor that is repeated for another is a table or a number, whatever made it. A run knows of an
            # activation only that it was scaled; a search knows of its projection too.
            if small.shape != out.shape == large.shape and all(f.origin is ACTIVATION for f in self.flows(small)):
                return small is one
        return bool(self.flows(other) and not self.flows(one))

    def _may_gate(self, x: Any) -> bool:
        """Return whether a factor of one entry may be the gate of a batch of one; a search follows gates itself."""
        return False

    def _hides(self, x: Any) -> bool:
        """Return whether a tensor holds only zeros and ones, as a mask does, and no logits; only a search looks.

        A parameter hides nothing, and neither do ones for whole rows, which a temperature may be at first.
        """
        if any(flow.origin.kind == "product" and not flow.origin.is_plain for flow in self.flows(x)):
            return False
        if not self.places or x.dtype == torch.bool:
            return True
        if isinstance(x, nn.Parameter) or not may_read(x, waits=True):
            return False
        return bool(((x == 0) | (x == 1)).all()) and (x.shape[-1:] > (1,) or bool((x == 0).any()))

    def _is_by_head(self, x: Any, flow: Flow) -> bool:
        """Return whether a tensor multiplies an activation by one number, or one for each head; only a search looks."""
        axis, index = flow.origin.axis, flow.entries
        if index is None or axis is None or not isinstance(x, Tensor) or not may_read(x, waits=True) or self._hides(x):
            return False
        if (x.dim() and x.shape[-1] > 1) if self.is_parameter(x) else self.flows(x):
            return False
        if torch.broadcast_shapes(x.shape, index.shape) != index.shape:  # the activation is repeated for it
            return False
        tokens = [dim for dim in range(index.dim()) if axis not in varying(flow, dim)]
        x = x.expand(index.shape)
        return all(bool((x == x.narrow(dim, 0, 1)).all()) for dim in (*tokens, -1))

    def _pass_on(
        self, name: str, func: Any, args: Any, kwargs: Any, known: list[tuple[Tensor, Flows]], out: Tensor, place: int
    ) -> Flows:
        """Return what a function leaves of the flows of its arguments in its result `out`."""
        flows = [flow for _, flows in known for flow in flows]
        if name in ("max", "maximum", "clamp", "clamp_min", "clamp_max", "minimum") and _is_far(args, kwargs):
            name = "identity"
        if name in ("sub", "add", "rsub") and len(known) > 1:
            # The largest logit of a row, or the sum of all, subtracted from each of them, changes no softmax.
            first, (other, second) = known[0][1], known[1]
            shifts = [f for f in second if f.odd in ("max", "amax", "logsumexp") and other.shape[-1:] in ((), (1,))]
            first = tuple(f._replace(shifted=True) for f in first) if shifts else first
            times = (-1.0 if name == "sub" else 1.0) * float(kwargs.get("alpha", 1))
            second = tuple(f._replace(factor=f.factor * times) for f in second if f not in shifts)
            both = _products(first) & _products(second)
            flows = [_odd_flow(f, MULTIPLES) if f.origin in both else f for f in (*first, *second)]
        if name in JOINS and len(set.union(*(_products(flows) for _, flows in known))) > 1:
            flows = [_odd_flow(f, "a join of two products") if f.origin.kind == "product" else f for f in flows]
        pair = [(x, flows) for x, flows in known if x.is_floating_point()] if name == "where" else known
        if (name in (*JOINS, "setitem") or (name == "where" and len(pair) > 1)) and _mixes_factors(pair):
            flows = [_partial_flow(f) if f.origin.is_plain else f for f in flows]
        if name in MOVES or name == "setitem":
            moved = [f for f in flows if not self.places or f.entries is not None]
            lost = [f for f in flows if self.places and f.entries is None]
            indices = {f.origin: self._move(name, func, args, kwargs, f.origin, place) for f in moved if self.places}
            return _merge([*(f._replace(entries=indices.get(f.origin)) for f in moved), *lost])
        if name in ("neg", "rsub"):
            return _merge([_widen(f._replace(factor=-f.factor), out) for f in flows])
        if name in KEEPS:
            if self.places:
                kept = _without_statistics(known, out)
                flows = [f for f in flows if f.origin in kept]
            if name in ("add", "sub") and _mixes_factors(known):
                flows = [_partial_flow(f) if f.origin.is_plain else f for f in flows]
            return _merge([_widen(f, out) for f in flows])
        return _merge([_widen(_odd(_keep_features(f, out), name), out) for f in flows])

    def _move(self, name: str, func: Any, args: Any, kwargs: Any, origin: Origin, place: int) -> Tensor | None:
        """Return the places of entries after a function that moves them; None if it does not move integers."""

        def places(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(places(each) for each in x) if type(x) in (list, tuple) else x
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            found = [f.entries for f in self.flows(x) if f.origin is origin]
            return found[0] if found else torch.zeros(x.shape, dtype=torch.int32)

        try:
            if name == "pad":
                return torch.nn.functional.pad(places(args[0]), kwargs.get("pad", args[1] if len(args) > 1 else None))
            if name == "setitem":
                target = places(args[0])
                if isinstance(args[2], Tensor) and target is not None:
                    target = target.clone()
                    target[args[1]] = places(args[2])
                return target  # type: ignore[no-any-return]
            moved = func(*places(args), **{key: places(value) for key, value in kwargs.items()})
            return list(tensors((moved,)))[place]
        except (RuntimeError, TypeError, IndexError):
            return None

    def _change_base(self, name: str, args: Any, known: list[tuple[Tensor, Flows]], out: Any) -> None:
        """Mark the tensors that share memory with one that was changed in place, unless it was only shifted or hidden.

        They are the tensor of which it is a part, and others with some of its entries.
        """
        target = args[0] if args else None
        if out is not target or not isinstance(target, Tensor):
            return
        base, changes = target._base, name not in KEEPS and name != "setitem"
        writes = any(flows for x, flows in known[1:] if x is not target)
        if base is not None and (writes or (changes and self.flows(base))):
            flows = _merge([*self.flows(base), *(f for x, flows in known[1:] for f in flows)])
            if name in WRITES and all(f.origin.kind == "plain" and (f.factor, f.odd) == (1, None) for f in flows):
                self.note(base, tuple(f._replace(entries=None) for f in flows))  # a cache
            else:
                self._mark(base, flows, name)
        for x in [made() for made, _ in self.followed.values()] if changes else ():
            if x is not None and x is not target and x is not base and _overlap(x, target):
                self._mark(x, self.flows(x), name)

    def _mark(self, x: Tensor, flows: Flows, name: str) -> None:
        self.note(x, tuple(_odd_flow(f, f"{name} of a part")._replace(entries=None) for f in flows))


class Comparing(Following):
    """Follows the forward of a site in eager code, to compare it with the example.

    Args:
        site: see `FoundSite`.
        eager: whether it follows.
    """

    def __init__(self, site: Any, *, eager: bool = True) -> None:
        super().__init__()
        self.site, self.eager = site, eager and is_eager()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function that is not the attention."""
        # The one method that Dynamo reads only as a method.
        out = args[0].unflatten(*args[1:], **kwargs) if func is Tensor.unflatten else func(*args, **kwargs)
        if self.eager:
            name = name_of(func)
            if name in SCALES or self.knows(args) or (kwargs and self.knows(kwargs.values())):
                self.follow(name, func, args, kwargs, out)
        return out

    def _may_gate(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.dim() == 0:
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
            gate = next((flow.gate for flow in self.flows(x) if flow.origin.is_plain), 1.0) or 1.0
            if not any(same_factor(one, factor, rounded=x.element_size() < 4) for one in (given, given / abs(gate))):
                self.refuse(f"multiplies its {what} by {given:g}, and in the example by {factor:g}")


def same_factor(one: float, other: float, *, rounded: bool) -> bool:
    """Return whether two factors are one; `rounded` if a half type may have rounded one of them."""
    return math.isclose(one, other, rel_tol=ROUNDED if rounded else SAME)


def number(x: Any) -> float | None:
    """Return a number, or the only entry of a tensor, as a float; None for everything else."""
    if isinstance(x, numbers.Real):
        return float(x)
    if isinstance(x, Tensor) and x.numel() == 1 and may_read(x, waits=True):
        return until_changed(x, "number", lambda: float(x.detach()))
    return None


def from_last(dim: int | None, axes: int) -> int:
    """Return the axis of a softmax, counted from the last of `axes`, -1; None means what it means in PyTorch."""
    dim = (0 if axes in (0, 1, 3) else 1) if dim is None else dim
    return dim if dim < 0 else dim - max(axes, 1)


def alpha(rest: dict[str, Any]) -> float:
    """Return the factor of baddbmm or addmm on its product; arguments as `operands` returns them."""
    return float(rest.get("alpha", 1.0))


def factor_of(flows: Flows, *, sums: bool = False) -> float | None:
    """Return the factor of an activation, 1 if none is known, None if it is unclear; `sums` takes that of one part."""
    made = sorted((f for f in flows if f.origin.kind in ("plain", "product")), key=lambda f: not f.origin.is_plain)
    if not made:
        return 1.0
    return abs(made[0].factor) if made[0].odd is None or (sums and made[0].odd == PART) else None


def operands(name: str, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any, dict[str, Any]] | None:
    """Return (head, a, b, rest), so that func(*head, a, b, **rest) is the product; None if it is not of two tensors."""
    rest = dict(kwargs)
    given = list(args)
    if name == "einsum" and len(given) == 2 and isinstance(given[1], list | tuple):
        given = [given[0], *given[1]]
    given += [rest.pop(key) for key in PRODUCTS[name][len(given) :] if key in rest]
    count = 2 if len(PRODUCTS[name]) == 2 else 3
    if len(given) != count or (name == "einsum" and not isinstance(given[0], str)):
        return None
    return given[:-2], given[-2], given[-1], rest


def equation(name: str, head: list[Any], a: Tensor, b: Tensor) -> tuple[str, str, str] | None:
    """Return the letters of the axes of both operands and of their product; None for products of vectors."""
    return _letters(head[0] if name == "einsum" else None, a.dim(), b.dim())


def is_product(name: str, args: Any) -> bool:
    """Return whether a function of `FUNCTIONS` is a softmax, or a product that sums over something.

    An einsum that does not makes a table, such as ``i,j->ij`` of positions and frequencies, which hosts cache.
    """
    if name != "einsum" or not isinstance(args[0], str):
        return True
    inputs, arrow, result = args[0].partition("->")
    letters = [s for s in inputs if s.isalpha()]
    return any(s not in result if arrow else letters.count(s) > 1 for s in letters)


@functools.lru_cache
def _letters(given: str | None, first: int, second: int) -> tuple[str, str, str] | None:
    """Return `equation` for einsum's string, or None for a matrix product, and the numbers of axes."""
    if given is None:
        if min(first, second) < 2:
            return None
        batch = "ABCDEFGHIJ"
        one, two = (batch[len(batch) - axes + 2 :] for axes in (first, second))
        return one + "nd", two + "dm", max(one, two, key=len) + "nm"
    inputs, arrow, result = given.replace(" ", "").partition("->")
    one, two = inputs.split(",")
    more = [max(axes - len(letters.replace("...", "")), 0) for axes, letters in ((first, one), (second, two))]
    if not arrow:
        result = ("..." if "..." in inputs else "") + "".join(
            letter for letter in sorted(set(one + two) - {"."}) if (one + two).count(letter) == 1
        )
    rare = "αβγδεζηθικ"
    one, two = (s.replace("...", rare[len(rare) - n :]) for s, n in ((one, more[0]), (two, more[1])))
    return one, two, result.replace("...", rare[len(rare) - max(more) :])


def varying(flow: Flow, dim: int) -> set[int]:
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


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results, also in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


def _all_places(x: Tensor) -> Tensor:
    """Return 1 + the place of each entry of a tensor."""
    return torch.arange(1, x.numel() + 1, dtype=torch.int32).view(x.shape)


def _holds_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and neither a mask nor an index."""
    return x.is_floating_point() or x.is_complex()


def _is_learned(x: Any) -> bool:
    """Return whether `x` is a parameter; a number that is kept as one but is not trained is a number."""
    return isinstance(x, nn.Parameter) and (x.requires_grad or x.numel() > 1)


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors have entries of one storage in common; False where no storage can be read."""
    if transform() or not all(may_read(x, waits=True) and x.layout == torch.strided for x in (one, two)):
        return False
    if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr():
        return False
    if one.dtype != two.dtype or (one.storage_offset(), one.numel()) == (two.storage_offset(), two.numel()):
        return True
    places = torch.arange(max(map(_end, (one, two))))
    first, second = (places.as_strided(x.shape, x.stride(), x.storage_offset()).flatten() for x in (one, two))
    return bool(torch.isin(first, second).any())


def _end(x: Tensor) -> int:
    """Return the place in its storage after the last entry of a tensor."""
    return 1 + int(x.storage_offset()) + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _only_parameters(given: list[Tensor]) -> bool:
    floating = [x for x in given if x.is_floating_point()]
    return bool(floating) and all(map(_is_learned, floating))


def _products(flows: Flows) -> set[Origin]:
    """Return the products from which a tensor was made."""
    return {flow.origin for flow in flows if flow.origin.kind == "product"}


def _partial_flow(flow: Flow) -> Flow:
    """Return the flow of a sum or a join, of whose parts one has the factor of `flow`, and another has not."""
    return flow._replace(odd=PART, factor=1.0) if flow.odd in (None, PART) else flow


def _odd_flow(flow: Flow, why: str | None) -> Flow:
    """Return a flow that is odd for a reason, if it is not for another; a part with a factor gives way to it."""
    return flow._replace(odd=why) if why and flow.odd in (None, PART) else flow


def _odd(flow: Flow, name: str) -> Flow:
    """Return a flow through a function that is not known: activations go on, logits and factors are lost."""
    if flow.origin.kind in ("plain", "parameter") and flow.factor == 1 and name not in NORMS:
        return flow
    if name in BY_HAND and flow.origin.kind == "product" and flow.origin.number < 0:  # its `odd` only names the product
        return flow._replace(odd=name)
    return _odd_flow(flow, name)


def _widen(flow: Flow, out: Tensor) -> Flow:
    """Return a flow with places in the shape of `out`."""
    if flow.entries is None or flow.entries.shape == out.shape:
        return flow
    try:
        return flow._replace(entries=flow.entries.expand(out.shape))
    except RuntimeError:
        return flow._replace(entries=None)


def counted(flows: Iterable[Flow]) -> tuple[Origin, ...]:
    """Return the products of two activations that are followed by their number, so not those by entries."""
    return tuple(
        f.origin for f in flows if f.origin.kind == "product" and not f.origin.is_plain and f.origin.number >= 0
    )


def _are_activation(flows: Flows, origin: Origin) -> bool:
    """Return whether a tensor is an activation, which `origin` is not a part of."""
    return any(f.origin.kind == "plain" for f in flows) and all(f.origin is not origin for f in flows)


def _is_smaller(x: Tensor, out: Tensor) -> bool:
    """Return whether a tensor is repeated for `out`, or was before."""
    return x.numel() < out.numel() or (
        x.layout == torch.strided and any(step == 0 for step, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    )


def _is_statistic(flow: Flow, x: Tensor, out: Tensor) -> bool:
    """Return whether `x` holds numbers made from weights or from a product by entries, such as means.

    They may gate or shift an activation, which becomes neither weights nor logits by that.
    """
    if flow.origin.kind == "product":
        return flow.origin.number < 0
    return flow.origin.kind == "softmax" and flow.entries is None and _is_smaller(x, out)


def _without_statistics(known: list[tuple[Tensor, Flows]], out: Tensor) -> set[Origin]:
    """Return from what a sum is made, if statistics that shift an activation do not count."""
    return {
        flow.origin
        for x, flows in known
        for flow in flows
        if not (_is_statistic(flow, x, out) and any(_are_activation(others, flow.origin) for _, others in known))
    }


def _applies(flow: Flow, weights: Tensor, others: Flows, out: Tensor) -> bool:
    """Return whether a product by entries applies weights to values; a table before the axis of keys does not."""
    if not _is_smaller(weights, out):
        return False
    index, axis = flow.entries, flow.origin.axis
    if _are_activation(others, flow.origin) or index is None or axis is None or index.dim() != out.dim():
        return True
    keys = [dim for dim in range(out.dim()) if axis in varying(flow, dim)]
    return not keys or any(index.shape[dim] != out.shape[dim] for dim in range(min(keys), out.dim()))


def _keep_features(flow: Flow, out: Tensor) -> Flow:
    """Return the flow of an activation of whose tokens a function has made others, as pooling does.

    Features are where they were if their axes are as long, and the others are as many.
    """
    index, axis = flow.entries, flow.origin.axis
    if flow.origin.kind != "plain" or index is None or axis is None:
        return flow
    if index.shape == out.shape or index.dim() != out.dim():
        return flow
    others = [dim for dim in range(out.dim()) if axis not in varying(flow, dim)]
    if any(index.shape[dim] != out.shape[dim] for dim in range(out.dim()) if dim not in others):
        return flow
    for dim in others:
        index = index.narrow(dim, 0, 1)
    return flow._replace(entries=index.expand(out.shape))


def _mix(flow: Flow, axis: int, out: Tensor) -> Flow | None:
    """Return the flow of weights whose heads, along `axis`, a layer mixes; None if it reads them as features.

    Weights that are read as features, as a coverage is, are weights no more.
    """
    index = flow.entries
    if index is None or index.dim() != out.dim() or flow.origin.axis is None or flow.origin.axis in varying(flow, axis):
        return None
    return _widen(flow._replace(entries=index.narrow(axis, 0, 1)), out)


def _mixes_factors(known: list[tuple[Tensor, Flows]]) -> bool:
    """Return whether a scaled activation meets a number, or a tensor that is not known to have its factor."""
    scaled = (f for _, flows in known for f in flows if f.origin.kind == "plain" and f.factor != 1)
    factor = next((f.factor for f in scaled), None)
    if factor is None:
        return False
    return len(known) < 2 or any(not any(_same(f.factor, factor) for f in flows) for _, flows in known)


def _same(one: float, two: float) -> bool:
    return math.isclose(abs(one), abs(two))


def _is_far(args: Any, kwargs: Any) -> bool:
    """Return whether all bounds of clamp, max or maximum are too far to change logits."""
    given = (*args[1:], *(v for k, v in kwargs.items() if k in ("min", "max", "other")))
    bounds = [number(x) for x in given if x is not None]
    return bool(bounds) and all(x is not None and abs(x) >= NEUTRAL for x in bounds)


def _merge(flows: list[Flow]) -> Flows:
    """Return each origin once; activations count as one, and parameters only if nothing else is there."""
    if len(flows) < 2:
        return tuple(flows)
    found: dict[Origin, Flow] = {}
    plain: Flow | None = None
    for flow in flows:
        kind = flow.origin.kind
        if kind == "parameter":
            continue
        if flow.origin.is_plain:
            if plain is None:
                plain = flow
            elif not _same(plain.factor, flow.factor):
                plain = _partial_flow(plain)
            continue
        other = found.get(flow.origin)
        if other is None:
            found[flow.origin] = flow
        elif other.factor != flow.factor:
            found[flow.origin] = other._replace(odd=other.odd or flow.odd or MULTIPLES)
        elif flow.odd and not other.odd:
            found[flow.origin] = other._replace(odd=flow.odd)
    joined = (*found.values(), *(() if plain is None else (plain,)))
    return joined or tuple(flows[:1])
