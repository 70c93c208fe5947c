"""Run an example of a model, and note its calls of attention, products and softmaxes, which are judged afterwards."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..compat import force_eager, is_compiling, may_read
from ..errors import UnsupportedError
from ..mechanism import Mechanism
from .following import ACTIVATION, Flow, Flows, Following, Origin, counted, factor_of, is_learned, take, varying
from .functions import (
    ADDS,
    BY_HAND,
    KEEPS,
    MOVES,
    NORMS,
    OTHER_PRODUCTS,
    PRODUCTS,
    PROJECTIONS,
    SCALES,
    SOFTMAX,
    alpha,
    entries_from,
    equation,
    from_last,
    is_counted,
    map_tensors,
    name_of,
    operands,
    tensors,
)
from .sites import common_norm, in_autograd_function, in_double, restoring, run_example
from .universal import ATTENTION_FUNCTIONS, Call
from .written import HIDDEN


@dataclass(eq=False)
class Frame:
    """One run of the forward of a module."""

    path: str
    module: nn.Module
    known: bool  # it is a part of attention that is known, and not looked into
    products: list[Origin] = field(default_factory=list)  # that were formed in it, or in modules that it called
    softmaxes: "list[Softmax]" = field(default_factory=list)
    calls: int = 0  # how often it called an attention function


@dataclass(eq=False)
class Softmax:
    """One softmax."""

    terms: Flows  # the products in its logits
    origin: Origin  # that of its weights
    owner: Frame  # the innermost one in which its products were formed too
    axes: dict[Origin, set[str]]  # the letters of each product along which the softmax sums
    projected: bool  # a projection is in its logits
    norms: set[Origin]  # whose norms were added to its logits
    shape: tuple[int, ...]
    queries: dict[Origin, int] = field(default_factory=dict)  # which operand of each product is q, where that is known
    causal: bool = False

    @property
    def place(self) -> str:
        """The path of the module that it belongs to."""
        path = self.owner.path
        return path.rpartition(".")[0] if isinstance(self.owner.module, nn.Softmax) else path

    @property
    def is_applied(self) -> bool:
        """Whether its weights are applied to values; weights of additive attention only by a product."""
        uses, is_additive = self.origin.uses, all(any(flow.origin.learned) for flow in self.terms)
        return "applied" in uses or ("by entries" in uses and not is_additive)

    @property
    def is_usual(self) -> bool:
        """Whether it is shaped like attention, [B, H, N, M] or [B·H, N, N], which others rarely are."""
        return len(self.shape) > 3 or (len(self.shape) == 3 and self.shape[1] == self.shape[2])


@dataclass(frozen=True)
class Operand:
    """One operand of a product."""

    sizes: dict[str, int]  # of its axes, by letter
    places: Tensor | None  # of its first feature; see `Flow`
    features: set[str] | None  # the letters along which the features of its projection change; None if not known
    factor: float | None  # of the host, on a sum too; None if it cannot be separated
    norm: float | None  # that all its vectors have
    seen: tuple[float, float] | None  # sums that other values do not have
    like: Tensor  # without values: has the device and the type
    separable: bool  # whether the factor is known, and on all of it
    odd: str | None  # what stands between the factor and the product
    bent: bool  # see `Flow`
    origin: Origin | None  # of its projection


UNSEEN = "a function that PyTorch does not show, such as compiled code,"


class _Tensors:
    """A set of tensors, which it does not keep alive."""

    def __init__(self, values: Any = ()) -> None:
        self._refs: dict[int, ref[Tensor]] = {}
        self.add(values)

    def add(self, values: Any) -> None:
        """Add the tensors of arguments or results."""
        self._refs |= {id(x): ref(x) for x in tensors((values,))}

    def __contains__(self, x: Tensor) -> bool:
        found = self._refs.get(id(x))
        return found is not None and found() is x


class Search(Following):
    """Runs an example without gradients, and notes calls, products and softmaxes with what is needed to judge them.

    `known` are the paths of modules that are not looked into.
    """

    running: list[Frame]

    def __init__(self, model: nn.Module, known: Collection[str]) -> None:
        super().__init__()
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.known = known
        self.frames: list[Frame] = []
        self.calls: dict[str, Call] = {}  # by the paths of their modules
        self.products: list[Origin] = []
        self.softmaxes: list[Softmax] = []
        self.refused: dict[str, str] = {}  # paths of attention that cannot be changed -> why
        self.by_hand: dict[Origin, str] = {}  # products that became weights by a function of `BY_HAND` -> its name
        self.made = _Tensors([*model.parameters(), *model.buffers()])  # what PyTorch's functions made
        self.unseen: set[str] = set()  # paths of modules in which something else made a tensor
        self.lost = _Tensors()  # such tensors, and what was made from them
        self.entrywise = _Tensors()  # products by entries of two projected activations

    def run(self, example: Any, *, changed: bool = False) -> "Search":
        """Run the model, on other values if `changed`. Random state and buffers stay as they were."""
        modules = [module for module in self.paths if not isinstance(module, torch.jit.ScriptModule)]  # take no hooks
        handles = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        handles += [module.register_forward_hook(self._leave, always_call=True) for module in modules]
        if changed:
            handles.append(self.model.register_forward_pre_hook(_other_inputs, with_kwargs=True, prepend=True))
        try:
            with restoring(self.model), force_eager(), self:
                run_example(self.model, example)
        finally:
            for handle in handles:
                handle.remove()
        return self

    def _enter(self, module: nn.Module, inputs: Any, named: Any) -> None:
        if not self.running:
            self.made.add((inputs, named))
        path = self.paths[module]
        known = path in self.known or isinstance(module, Mechanism) or bool(self.running and self.running[-1].known)
        frame = Frame(path, module, known)
        self.running.append(frame)
        self.frames.append(frame)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._note_unseen_makers(output)
        self.made.add(output)
        take(flow for x in tensors((output,)) for flow in self.flows(x))
        self.running.pop()

    def _note_unseen_makers(self, values: Any) -> None:
        """Note the running modules if no function of PyTorch that was seen made one of some tensors."""
        for x in tensors((values,)):
            if x.is_floating_point() and x not in self.made:
                self._note_unseen()
                self.lost.add(x)

    def _note_unseen(self) -> None:
        self.unseen.update(frame.path for frame in self.running)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running or is_compiling():
            return func(*args, **kwargs)
        self._note_unseen_makers((*args, *kwargs.values()))
        known = self.running[-1].known
        if func in ATTENTION_FUNCTIONS and not known:
            self._on_call(func, args, kwargs)
        lost = any(x in self.lost for x in tensors((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        self.made.add(out)
        if lost:
            self.lost.add(out)
        if type(func).__module__ == "torch._ops":  # an operator of the host or of its kernels
            self._note_unseen()
        if not known:
            self._on_result(func, args, kwargs, out)
        return out

    def _on_result(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a product or a softmax, or follow another function."""
        name = name_of(func)
        if name in PRODUCTS and is_counted(name, args):
            self._on_product(name, args, kwargs, out)
        elif name == SOFTMAX:
            self._on_softmax(args, kwargs, out)
        elif isinstance(out, Tensor) and (
            name in OTHER_PRODUCTS
            or (name in (*PRODUCTS, "linear") and self._are_projected(entries_from(name, args, kwargs)[:2]))
        ):
            if not self._applies_weights(args):
                self.begin(out, Origin("product", frames=tuple(self.running)), odd=name)
        else:
            self.follow(name, func, args, kwargs, out)
            if name in SCALES and isinstance(out, Tensor):
                self._on_entrywise(args, out)
            elif name in ("sum", "nansum", "mean"):
                self._on_sum(args, kwargs, out)
            elif name in MOVES | KEEPS and any(x in self.entrywise for x in tensors(args)):
                self.entrywise.add(out)

    def note(self, x: Any, flows: Flows) -> None:
        """Remember from what `x` was made, as long as it lives; its places take as much memory."""
        super().note(x, flows)
        if flows:
            key, followed = id(x), self.followed

            def forget(dead: ref[Tensor]) -> None:
                if key in followed and followed[key][0] is dead:
                    del followed[key]

            followed[key] = ref(x, forget), flows

    def begin(self, x: Tensor, origin: Origin, factor: float = 1.0, odd: str | None = None, also: Flows = ()) -> None:
        """Begin to follow `x`, the result of `origin`; it also has the flows `also`."""
        places = None
        if origin.kind != "parameter" and not x.is_nested:
            places = torch.arange(1, x.numel() + 1, dtype=torch.int32).view(x.shape)
        origin.shape = tuple(x.shape)
        self.note(x, (Flow(origin, factor, odd, places, tuple(self.running)), *also))

    def follow(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Follow as a run does; begin at projections, and at tensors that are made from parameters only."""
        given = entries_from(name, args, kwargs)
        if name in PROJECTIONS:
            self._on_projection(name, given, out)
            return
        super().follow(name, func, args, kwargs, out)
        floating = [x for x in given if x.is_floating_point()]
        if floating and all(map(is_learned, floating)):
            for result in tensors((args[0] if name == "setitem" else out,)):
                if not self.flows(result):
                    self.begin(result, Origin("parameter"))

    def _on_projection(self, name: str, given: list[Tensor], out: Tensor) -> None:
        """Begin at a linear layer or convolution, and remember which logits or weights it mixes."""
        flows = [flow for x in given for flow in self.flows(x)]
        axis, kept = PROJECTIONS[name] % out.dim(), list[Flow]()
        for flow in [flow for flow in flows if flow.origin.kind == "softmax"]:
            if flow.places is None or flow.places.dim() != out.dim() or axis in (flow.along or ()):
                flow.origin.uses.append("applied")  # weights that are read as features, as a coverage is
            else:
                kept.append(flow._replace(places=flow.places.narrow(axis, 0, 1)).widened(out.shape))
        self.begin(out, Origin("plain", axis=axis, mixes=counted(flows)), also=tuple(kept))

    def _is_mask(self, x: Any) -> bool:
        """Return whether a tensor holds only zeros and ones, as a mask does, and no logits.

        A parameter hides nothing, and neither do ones for whole rows, which a temperature may be at first.
        """
        if any(flow.origin.is_logits for flow in self.flows(x)):
            return False
        if x.dtype == torch.bool:
            return True
        if isinstance(x, nn.Parameter) or not may_read(x):
            return False
        return bool(((x == 0) | (x == 1)).all()) and (x.shape[-1:] > (1,) or bool((x == 0).any()))

    def _on_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a call of an attention function, or why the module that makes it cannot be changed."""
        given = dict(zip(("query", "key"), args, strict=False)) | kwargs
        frame = self._frames_with_factors(given["query"], given["key"])[-1]
        frame.calls += 1
        try:
            self._read(frame, func, given, args, kwargs)
        except UnsupportedError as error:
            self.refused.setdefault(frame.path, str(error))

    def _read(self, frame: Frame, func: Any, given: dict[str, Any], args: Any, kwargs: Any) -> None:
        if in_autograd_function():
            raise UnsupportedError(
                "it attends inside of a torch.autograd.Function, whose derivative would stay the host's; call the "
                "attention outside of it"
            )
        call = replace(ATTENTION_FUNCTIONS[func].read(frame.path, *args, **kwargs), repeated=frame.calls > 1)
        if call.function != "multi_head_attention_forward":
            pair = [given[name] for name in ("query", "key")]
            flows = [self.flows(x) for x in pair]
            separable = not any(map(self._may_miss_factor, pair)) and all(factor_of(one) is not None for one in flows)
            call = call.with_factors(*(factor_of(one, sums=True) for one in flows), separable=separable)
        self.calls[frame.path] = self.calls[frame.path].join(call) if frame.path in self.calls else call

    def _may_miss_factor(self, x: Tensor) -> bool:
        """Return whether a factor on `x` may have been missed, because it is lost and no projection is known of it."""
        return x in self.lost and all(f.origin is ACTIVATION or not f.origin.is_activation for f in self.flows(x))

    def _frames_with_factors(self, *operands: Tensor) -> tuple[Frame, ...]:
        """Return the running modules in which the host also multiplied the operands by its factors."""
        frames = tuple(self.running)
        for flow in (flow for x in operands for flow in self.flows(x)):
            if factor_of((flow,), sums=True) not in (None, 1):
                frames = tuple(a for a, b in zip(frames, flow.frames, strict=False) if a is b) or frames[:1]
        return frames

    def _on_entrywise(self, args: Any, out: Tensor) -> None:
        """Remember a product by entries of two activations: queries times keys, or weights times values."""
        pair = [x for x in args if isinstance(x, Tensor) and x.numel() > 1 and not self.is_parameter(x)]
        two = len(pair) == 2 and pair[0] is not pair[1]
        for x in pair if two else ():
            if x.numel() < out.numel():
                self._note_by_hand(x)
        if any(x in self.entrywise for x in pair) or (two and self._are_projected(pair)):
            self.entrywise.add(out)

    def _on_sum(self, args: Any, kwargs: Any, out: Tensor) -> None:
        """Begin at a sum over the features of a product by entries."""
        x: Tensor = args[0] if args else kwargs["input"]
        if x not in self.entrywise:
            return
        given = kwargs.get("dim", args[1] if len(args) > 1 else None)
        given = range(x.dim()) if given is None else (given,) if isinstance(given, int) else given
        dims = {dim % max(x.dim(), 1) for dim in given}
        if any(f.places is None or dims & (f.along or set()) for f in self.flows(x)):
            origin = Origin("product", frames=tuple(self.running))
            self.begin(out, origin, odd="a sum of products by entries", also=self.flows(out))

    def _are_projected(self, pair: Sequence[Tensor]) -> bool:
        """Return whether all of some tensors come from projections."""
        return all(any(flow.origin.axis is not None for flow in self.flows(x)) for x in pair)

    def _note_by_hand(self, weights: Tensor) -> None:
        """Note the products from which a function of `BY_HAND` made the weights of some values."""
        for flow in self.flows(weights):
            if flow.origin.is_logits and flow.odd in BY_HAND:
                self.by_hand.setdefault(flow.origin, flow.odd)

    def _on_product(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        origin = Origin("product", len(self.products), frames=tuple(self.running))
        for products in (self.products, *(frame.products for frame in self.running)):
            products.append(origin)
        parts = operands(name, args, kwargs)
        if parts is None:
            self.begin(out, origin, odd=f"{name} of more than two tensors")
            return
        head, a, b, rest = parts
        pair, letters = (a, b), equation(name, head, a, b)
        take(flow for x in pair for flow in self.flows(x))
        origin.equation = letters or origin.equation
        if in_autograd_function():
            self._note_uses(pair, letters, (False, False), out)
            self.begin(out, origin, odd="an autograd.Function with a derivative of its own")
            return
        origin.learned = tuple(self.is_parameter(x) for x in pair)
        if all(origin.learned):  # such as embeddings of the first layer, made from a table, and a projection
            weights = tuple(is_learned(x if x._base is None else x._base) for x in pair)
            origin.learned = weights if any(weights) else origin.learned
        applied, kept = self._note_uses(pair, letters, origin.learned, out)
        if all(origin.learned) or (applied and not any(origin.learned)):  # of parameters only, or of weights and values
            origin.kind, origin.learned = "plain", ()
        if not letters or len(contracted(letters)) != 1:
            self.begin(out, origin, odd=None if origin.is_activation else f"{name} over {letters or 'vectors'}")
            return
        if any(origin.learned):  # a projection, whose features are those of the parameter
            parameter, other = letters[origin.learned.index(True)], letters[origin.learned.index(False)]
            own = [s for s in parameter if s in letters[2] and s not in other]
            origin.axis = letters[2].index(own[-1]) if own else None
            origin.mixes = counted(f for x in pair for f in self.flows(x))
        origin.frames = self._frames_with_factors(*pair)
        if origin.kind == "product":
            (feature,) = contracted(letters)
            origin.operands = tuple(self._operand(x, s, feature) for x, s in zip(pair, letters, strict=False))
        self.begin(out, origin, alpha(rest), also=(*self.addends(head, rest), *kept))
        if name in ADDS:
            take(self.flows(out))

    def _operand(self, x: Tensor, letters: str, feature: str) -> Operand:
        """Return what is known of an operand whose axes have `letters`; its product sums over `feature`."""
        flows = self.flows(x)
        flow = next((flow for flow in flows if flow.origin.is_activation), None)
        features = None if flow is None or flow.along is None else {letters[dim] for dim in flow.along}
        sizes, factor = dict(zip(letters, x.shape, strict=True)), factor_of(flows, sums=True)
        separable, odd, origin = factor_of(flows) is not None, flow and flow.odd, flow and flow.origin
        if self._may_miss_factor(x):
            separable, odd = False, UNSEEN
        norm, seen = None, None
        if may_read(x):
            wide, axis = in_double(x), letters.index(feature)
            vectors = wide.movedim(axis, -1)
            if flow is not None and flow.places is not None:  # padding has norms of its own
                vectors = vectors[flow.places.movedim(axis, -1).any(-1)]
            norm = common_norm(vectors, 1e-2 if x.dtype.itemsize < 4 else 2e-3)
            values = wide.flatten()
            seen = (values.sum().item(), (values * torch.linspace(1, 2, len(values)).to(values)).sum().item())
        places = (
            None if flow is None or flow.places is None else flow.places.narrow(letters.index(feature), 0, 1).clone()
        )
        bent = flow is not None and flow.bent
        return Operand(sizes, places, features, factor, norm, seen, x.new_empty(0), separable, odd, bent, origin)

    def _note_uses(
        self, pair: Any, letters: tuple[str, str, str] | None, learned: Sequence[bool], out: Tensor
    ) -> tuple[bool, list[Flow]]:
        """Note on the weights that a product applies to values how it uses them.

        Returns:
            Whether there are any; and the flows of its result, which is weights still where parameters mix their heads.
        """
        found, kept = False, list[Flow]()
        for i, x in enumerate(pair):
            if not learned[1 - i]:
                self._note_by_hand(x)
            for flow in self.flows(x):
                if flow.origin.kind != "softmax":
                    continue
                found, use, axis = True, "applied", flow.origin.axis
                if letters and flow.along is not None and axis is not None and flow.origin.shape[axis] > 1:
                    over = {letters[i][dim] for dim in flow.along}
                    use = "applied" if over & set(contracted(letters)) else "kept"
                if learned[1 - i] and use == "kept" and letters and len({*letters[i]}) == len(letters[i]):
                    kept.append(_mixed(flow, letters[i], letters[2], out))
                else:
                    flow.origin.uses.append(use)
        return found, kept

    def _applies_weights(self, args: Any) -> bool:
        """Note that a product of another kind applies weights to values; return whether there are any."""
        found = [f.origin for x in tensors(args) for f in self.flows(x) if f.origin.kind == "softmax"]
        for origin in found:
            origin.uses.append("applied")
        return bool(found)

    def _terms(self, logits: Tensor) -> tuple[Flows, Frame]:
        """Return the products in the logits of a softmax, and the module to which these belong.

        Logits of earlier modules, which are sites too, may be added to those of this one. They have a softmax already.
        """
        terms = tuple(flow for flow in self.flows(logits) if flow.origin.kind == "product" or flow.origin.mixes)
        own = tuple(flow for flow in terms if not flow.origin.softmaxes)
        owner = self._owner(own)
        if own and not any(owner in flow.origin.frames for flow in terms if flow not in own):
            return own, owner
        return terms, self._owner(terms)

    def _owner(self, terms: Flows) -> Frame:
        """Return the innermost running module in which all products of some logits were formed."""
        formed = [one for flow in terms for one in (flow.origin.mixes or (flow.origin,))]
        around = [
            frame
            for level, frame in enumerate(self.running)
            if all(len(one.frames) > level and one.frames[level] is frame for one in formed)
        ]
        return around[-1] if around else self.running[0]

    def _on_softmax(self, args: Any, kwargs: Any, out: Tensor) -> None:
        logits = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        terms, owner = self._terms(logits)
        origin = Origin("softmax", axis=from_last(dim, out.dim()) % max(out.dim(), 1))
        projected = any(flow.origin.axis is not None for flow in self.flows(logits))
        norms = {flow.origin for flow in self.flows(logits) if flow.odd in NORMS and flow.origin.is_activation}
        made = Softmax(terms, origin, owner, {}, projected, norms, tuple(out.shape))
        for softmaxes in (self.softmaxes, *(frame.softmaxes for frame in self.running)):
            softmaxes.append(made)
        if not terms:
            return
        for flow in terms:
            result = flow.origin.equation[2]
            if flow.places is not None and result:
                made.axes[flow.origin] = {result[axis] for axis in varying(flow, origin.axis or 0)}
            for one in (flow.origin, *flow.origin.mixes):
                one.softmaxes.append(made)
        made.queries = _find_queries(terms, made.axes, logits, origin.axis or 0)
        if out.dim() > 1 and may_read(logits):
            n, m = out.shape[-2:]
            future = torch.ones(n, m, dtype=torch.bool, device=out.device).triu(m - n + 1)
            made.causal = bool(future.any()) and bool(((logits <= HIDDEN) | ~future).all())
        self.begin(out, origin)


def _mixed(flow: Flow, own: str, result: str, out: Tensor) -> Flow:
    """Return the flow of weights with the axes `own` after a product with parameters, with the axes `result`."""
    assert flow.places is not None
    return flow._replace(places=_spread(flow.places, own, result, out.shape))


def _spread(places: Tensor, own: str, result: str, shape: Sequence[int]) -> Tensor:
    """Return places with the axes `own` along the axes `result` of a product; the first of those that it sums over."""
    for place in reversed(range(len(own))):
        places = places if own[place] in result else places.select(place, 0)
    left = [s for s in own if s in result]
    places = places.permute([left.index(s) for s in result if s in left])
    for place, s in enumerate(result):
        places = places if s in left else places.unsqueeze(place)
    return places.expand(shape)


def _find_queries(terms: Flows, axes: Mapping[Origin, set[str]], logits: Tensor, dim: int) -> dict[Origin, int]:
    """Return which operand of each product in some logits is q, where letters or tokens show it.

    A row along `dim` has one query. Windows that overlap hold a token several times, so a row may run along several
    axes of a product (Longformer). A product of one key runs along none; it has the queries of those joined with it.
    """
    flows = {flow.origin: flow for flow in terms if flow.origin in axes}
    fixed: dict[Origin, list[int]] = {}
    for origin in flows:
        one, two, _ = map(set, origin.equation)
        fixed[origin] = [i for i, keys in enumerate((two - one, one - two)) if axes[origin] <= keys]
    if any(len(found) != 1 for found in fixed.values()) and may_read(logits):
        flows = {o: flow for o, flow in flows.items() if all(one.places is not None for one in o.operands)}
        visible = (logits > HIDDEN).movedim(dim, -1)
        tokens = {o: [_tokens(flow, i, dim).where(visible, 0) for i in (0, 1)] for o, flow in flows.items()}
        rows = {o: [one.amax(-1) for one in both] for o, both in tokens.items()}
        for origin, both in tokens.items():
            if len(fixed[origin]) != 1:
                fixed[origin] = [i for i in (0, 1) if _agree(both[i], rows[origin][i][..., None])]
        queries = [rows[origin][found[0]] for origin, found in fixed.items() if origin in rows and len(found) == 1]
        for origin, both in rows.items():
            if len(fixed[origin]) != 1:
                fixed[origin] = [i for i in (0, 1) if any(_agree(both[i], query) for query in queries)]
    return {origin: found[0] for origin, found in fixed.items() if len(found) == 1}


def _tokens(flow: Flow, i: int, dim: int) -> Tensor:
    """Return the token of an operand of a product in each logit, in rows along the last axis; 0 for other logits."""
    assert flow.places is not None
    places, (*letters, result) = flow.origin.operands[i].places, flow.origin.equation
    tokens = _spread(places, letters[i], result, flow.origin.shape).flatten()
    entries = flow.places.movedim(dim, -1)
    return tokens[(entries - 1).clamp(min=0)].where(entries > 0, 0)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same tokens wherever both hold one."""
    return bool(((one == other) | (one == 0) | (other == 0)).all())


def contracted(letters: tuple[str, str, str]) -> list[str]:
    """Return the letters of the axes over which a product sums, such as d of nd, dm, nm."""
    return [s for s in letters[0] if s in letters[1] and s not in letters[2]]


def _other_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return other inputs of the same kind: numbers are turned around and scaled, masks stay."""

    def other(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.numel() > 1:
            return x.flatten().flip(0).view_as(x) * 1.3 + 0.1
        turns = x.dtype != torch.bool and x.numel() > 1 and x.max() > 1
        return x.flatten().flip(0).view_as(x) if turns else x

    return map_tensors(args, other), map_tensors(kwargs, other)
