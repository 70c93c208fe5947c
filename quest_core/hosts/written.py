"""The written-out site: a module that forms the product of q and k, its softmax and the product with v by itself.

``inject(model, "quest", example=batch)`` runs the model once on `batch` and follows every product of two activations to
its softmax and on to the values. A module in which all of them are understood becomes a site: its class gets a
subclass, in whose forward the operands of that one product are prepared by the score and the factor of the host gives
way to the score's own. Bias, mask, softmax and dropout stay the host's. With `standard` nothing is touched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import is_compiling, refuse_one_token
from ..config import AttentionConfig
from ..mechanisms.base import Score
from ..projections import HeadSizes
from .adapter import Capabilities, mechanism_for
from .following import Comparing, Flow, Origin, is_learned, same_factor, take
from .functions import (
    ADDS,
    NO_EQUATION,
    PRODUCTS_AND_SOFTMAX,
    SCALES,
    SOFTMAX,
    alpha,
    equation,
    from_last,
    is_counted,
    name_of,
    number,
    operands,
)
from .sites import Found, FoundSite, beyond_operands, in_compiled_graph, refuse_checkpoint, site_draft, without_factors
from .universal import ATTENTION_FUNCTIONS

HIDDEN = -5e3  # a logit at or below it is hidden, for normalizers that count what a row sees


class Axes(NamedTuple):
    """The letters of the axes of q and k, by role; "" for no axis, and several letters for several axes."""

    batch: str
    heads: str
    queries: str
    keys: str
    features: str


class _Turn(NamedTuple):
    """How the axes of an operand are turned to batch, heads, tokens, features, and back; None if they are so."""

    there: tuple[int, ...] | None
    back: tuple[int, ...] | None
    lacks_heads: bool  # one key head for all query heads

    @classmethod
    def of(cls, letters: str, axes: Axes) -> "_Turn":
        order = "".join(letter for letter in "".join(axes) if letter in letters)
        lacks_heads = axes.heads not in letters
        if order == letters:
            return cls(None, None, lacks_heads)
        return cls(tuple(map(letters.index, order)), tuple(map(order.index, letters)), lacks_heads)

    def turn(self, x: Tensor) -> Tensor:
        """Return an operand as a mechanism takes it."""
        x = x if self.there is None else x.permute(self.there)
        return x.unsqueeze(1) if self.lacks_heads else x

    def turn_back(self, x: Tensor) -> Tensor:
        """Return an operand as the host takes it."""
        x = x.squeeze(1) if self.lacks_heads else x
        return x if self.back is None else x.permute(self.back)


@dataclass(frozen=True)
class Product:
    """A product of two activations in a module's forward.

    The last two fields follow from the others, and are empty if `query` is None:

        einsum("bhnd,bhmd->bhnm", q, k)  query 0, axes b h n m d, q and k as they are
        einsum("bmhd,bnhd->bhmn", k, q)  query 1, axes b h n m d, q and k turned by (0, 2, 1, 3)
    """

    equation: tuple[str, str, str]  # letters of the axes of both operands and of the result
    query: int | None = None  # which operand is q, 0 or 1; None for a product that stays as it is
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)  # by which the host multiplies q, k and the product
    undone: tuple[float, float, float] = (1.0, 1.0, 1.0)  # those of `factors` that give way to the scale of a score
    head: str | None = None  # the letter of the axis of heads, if it is known
    axes: Axes = field(init=False, compare=False, default=Axes("", "", "", "", ""))
    turns: tuple[_Turn, ...] = field(init=False, compare=False, default=())  # how q and k are turned

    def __post_init__(self) -> None:
        if self.query is None:
            return
        q, k = self.in_order(self.equation[:2])
        result = self.equation[2]
        batch = "".join(s for s in result if s in q and s in k and s != self.head)
        queries = "".join(s for s in result if s in q and s not in k and s != self.head)
        keys = "".join(s for s in result if s not in q)
        features = "".join(s for s in q if s not in result)
        axes = Axes(batch, self.head or "", queries, keys, features)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "turns", tuple(_Turn.of(letters, axes) for letters in (q, k)))

    def in_order(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return q and k for both operands, or both operands for q and k."""
        return operands if self.query == 0 else operands[::-1]


PROJECTION = "projection"
"""A product with a parameter that is not of queries and keys."""


class SoftmaxOf(NamedTuple):
    """A softmax in a module's forward."""

    # For each product in its logits: the place in `Written.products`, the factor, and whether a tanh caps it.
    terms: tuple[tuple[int, float, bool], ...]
    dim: int  # its axis, counted from the last, -1


@dataclass(frozen=True, kw_only=True)
class Written(Found):
    """The products and softmaxes of one module's forward, which repeats them any number of times."""

    products: tuple[Product | str | None, ...]  # in order: also PROJECTION, and None for weights with values
    softmaxes: tuple[SoftmaxOf, ...] = ()  # in order
    multiplied: bool = False  # some logits were multiplied by a tensor of zeros and ones, as by a mask
    # The letters of the product in the order in which all logits hold its entries; None if they hold others, or if
    # their softmax is not over all keys.
    layout: str | None = None
    shifted: bool = False  # the host subtracts the largest logit of each row, or the like
    late: bool = False  # something takes a product before the host multiplies it by its factor, or without that

    does = "writes attention out"
    flags = (*Found.flags, "multiplied", "shifted", "late")
    optional: ClassVar[Mapping[str, Any]] = {**Found.optional, "layout": None}

    @property
    def asks(self) -> Capabilities:
        """The capabilities that the module needs of a mechanism."""
        return Capabilities(causal=self.causal, cross=self.cross, regroups=False)

    @property
    def prepared(self) -> list[Product]:
        """The products whose operands are prepared."""
        return [x for x in self.products if isinstance(x, Product) and x.query is not None]

    @property
    def scale(self) -> float:
        """The host's factor on q·k."""
        return math.prod(self.prepared[0].undone)

    def draft(self, module: nn.Module, config: AttentionConfig) -> Any:
        """Return the draft of the module as a site with a mechanism; its parameters are the same objects."""
        made = site_draft(WrittenOut, module, self)
        sizes = HeadSizes(self.heads, self.kv_heads, self.head_dim, self.head_dim, self.head_dim)
        made.add_module("mechanism", mechanism_for(module, config, sizes, self.scale, like=self.query))
        score = made.mechanism.score
        ours = [getattr(type(score), name) is getattr(Score, name) for name in ("forward", "query", "key")]
        made.keeps_queries = all(ours[:2])
        made.untouched = made.mechanism.fused and all(ours) and score.scale(self.head_dim) == self.scale
        return made

    def refusal(self, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the operands of the product and the place of the softmax, or None."""
        if why := beyond_operands(config, softmax_stays=False):
            return why
        for part in config.components:
            if part.learnable and any(product.head is None for product in self.prepared):
                return f"'{part.name}' must know the axis of heads, which the example does not show"
            if part.learnable and (self.repeated or len(self.prepared) > 1):
                return f"one forward forms more than one product, and '{part.name}' keeps something for each"
            if "queries" in part.reads and any(p.head is None and len(p.axes.queries) > 1 for p in self.prepared):
                return f"'{part.name}' must know which axis is that of heads, and two could be those of the queries"
            if part.axis == "normalizer" and not part.fused and self.shifted:
                return (
                    f"'{part.name}' needs the logits themselves, and the host subtracts a number from each row, "
                    "which changes no softmax; remove that line"
                )
            if part.axis == "normalizer" and not part.fused and self.layout is None:
                return f"'{part.name}' needs logits of queries and keys only, [..., N, M]"
        return None


# --- at run time ------------------------------------------------------------------------------------------------------


class WrittenOut(FoundSite):
    """The class of a site: its products get prepared operands."""

    found_attention: Written
    untouched: bool
    keeps_queries: bool  # the score takes the queries as they are

    def attention_mode(self) -> "_Preparing | None":
        """Return the mode that prepares operands, or None where the host computes the same and no Monitor watches."""
        return None if self.untouched and self.mechanism.monitor is None else _Preparing(self)


class _Formed(NamedTuple):
    """A product of queries and keys, kept until its softmax."""

    product: Product
    q: Tensor  # batch, heads, tokens, features; with the factors of the host
    k: Tensor
    shape: tuple[int, ...]  # of the result


def _is_projection(product: Product | str | None, a: Tensor, b: Tensor) -> bool:
    """Return whether a product is that of a linear layer, as DeepSpeed's ZeRO-3 computes it, and not `product`.

    The queries of `product` may be a parameter.
    """
    learned = [is_learned(x if x._base is None else x._base) for x in (a, b)]
    if isinstance(product, Product) and product.query is not None:
        return learned[1 - product.query]
    return sum(learned) == 1


class _Preparing(Comparing):
    """Prepares the operands of a site's products; in eager code it also compares the way to the softmax."""

    def __init__(self, site: WrittenOut) -> None:
        super().__init__(site)
        self.known = site.found_attention
        self.products = self.softmaxes = 0  # how many were formed so far
        self.mechanism = mechanism = site.mechanism
        self.keeps = not mechanism.fused or mechanism.monitor is not None  # whether the softmax needs `formed`
        self.rounded = False  # an operand has a half type
        # Whether a factor of the host on a product is left out, and not only undone on q.
        self.leaves = self.eager and not (site.untouched or self.known.late)
        self.unscaled: dict[Origin, float] = {}  # products that wait for that multiplication -> the factor
        self.formed: dict[int, _Formed] = {}  # by the number of products before it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (known := PRODUCTS_AND_SOFTMAX.get(func)) is not None and is_counted(known, args):
            if in_compiled_graph(self.site):
                return func(*args, **kwargs)
            return self._weigh(func, args, kwargs) if known == SOFTMAX else self._multiply(known, func, args, kwargs)
        if self.eager and func in ATTENTION_FUNCTIONS:
            self.refuse(f"calls {ATTENTION_FUNCTIONS[func].name} too")
        if self.unscaled and (logits := self._leave_out(func, args, kwargs)) is not None:
            return logits
        return self.call(func, args, kwargs)

    def _leave_out(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return logits as they are if a call multiplies them by the factor that is to be left out; None for others."""
        if (name := name_of(func)) not in SCALES or kwargs:
            return None
        logits, factor = args[::-1] if name == "mul" and not self.flows(args[0]) else args
        flows, by = self.flows(logits), number(factor)
        if len(flows) != 1 or (origin := flows[0].origin) not in self.unscaled or origin.takers or not by:
            return None
        by, is_tensor = by if name == "mul" else 1 / by, isinstance(factor, Tensor)
        if (is_tensor and factor.requires_grad) or not same_factor(by, self.unscaled[origin], rounded=self.rounded):
            return None
        del self.unscaled[origin]
        take(flows, by)
        # A factor that has axes may change the type of the logits.
        out: Tensor = func(logits, torch.ones_like(factor)) if is_tensor and factor.dim() else logits
        self.note(out, (flows[0].times(by),))
        return out

    def _is_mask(self, x: Any) -> bool:
        """Return whether a tensor may be a mask that the host multiplies logits by, as it did in the example."""
        return not x.is_floating_point() or self.known.multiplied

    def finish(self) -> None:
        """Raise UnsupportedError unless all products and softmaxes of the example took place."""
        rounds, rest = divmod(self.products, len(self.known.products))
        if rounds == 0 or rest or self.softmaxes != rounds * len(self.known.softmaxes):
            self.refuse(
                f"formed {self.products} products and {self.softmaxes} softmaxes, and the example had "
                f"{len(self.known.products)} and {len(self.known.softmaxes)}"
            )

    def _multiply(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        nth = self.products
        place = nth % len(self.known.products)
        self.products += 1
        product, parts = self.known.products[place], operands(name, args, kwargs)
        if parts is None:
            return func(*args, **kwargs)
        head, a, b, rest = parts
        if self.eager and product != PROJECTION and _is_projection(product, a, b):
            self.products = nth
            return func(*args, **kwargs)
        if not isinstance(product, Product):
            return func(*args, **kwargs)
        if self.eager:
            if (letters := equation(name, head, a, b) or NO_EQUATION) != product.equation:
                self.refuse(f"forms the product {letters}, and the example {product.equation}")
            refuse_checkpoint(self.known.path)
        if product.query is None:
            out = func(*args, **kwargs)
        else:
            q, k = (turn.turn(x) for turn, x in zip(product.turns, product.in_order((a, b)), strict=True))
            if self.eager:
                self.rounded |= a.element_size() < 4
                self.compare_factors(product.in_order((a, b)), product.factors)
            if not self.site.untouched:
                a, b = product.in_order(self._prepare(product, q, k))
            out = func(*head, a, b, **rest)
            if self.keeps:
                self.formed[nth] = _Formed(product, q, k, out.shape)
        if self.eager:
            flow = Flow(Origin("product", place), alpha(rest))
            self.note(out, (flow, *self.addends(head, rest)))
            if name in ADDS:
                take([flow])
            if self.leaves and product.query is not None and product.factors[2] != 1:
                self.unscaled[flow.origin] = product.factors[2]
        return out

    def _prepare(self, product: Product, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, which have the host's factors, as the score prepares them, in the layout of the host."""
        score: Any = self.mechanism.score
        factors = product.undone
        if self.site.keeps_queries:  # one multiplication in place of two
            factors = (1.0, *factors[1:])
        q, k, scale = score(*without_factors((q, k), factors), k, mask=None, is_causal=False)
        scale = scale / product.undone[0] * factors[0] / (1 if self.leaves else product.factors[2])
        return product.turns[0].turn_back(q if scale == 1 else q * scale), product.turns[1].turn_back(k)

    def _weigh(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits, dim = args[0] if args else kwargs["input"], kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim = from_last(dim, logits.dim())
        rounds, place = divmod(self.softmaxes, len(self.known.softmaxes))
        known = self.known.softmaxes[place]
        self.softmaxes += 1
        if self.eager:
            self._compare(known, logits, dim)
        formed = self._take(known, rounds) if self.keeps else []
        if not formed:
            return func(*args, **kwargs)
        mechanism, planes = self.mechanism, None
        if self.known.layout is not None:  # of one product
            if self.eager and logits.numel() != math.prod(formed[0].shape):
                self.refuse("takes a softmax of more than its product")
            planes = _Planes(logits, formed[0].product, self.known.layout, formed[0].shape)
        if mechanism.monitor is not None and not is_compiling():
            self._show(formed, logits, planes, dim)
        if mechanism.fused:
            return func(*args, **kwargs)
        assert planes is not None
        refuse_one_token(mechanism.config, *logits.shape[-2:])
        third = 3 if func is F.softmax else 2
        dtype, out = args[third] if len(args) > third else kwargs.get("dtype"), kwargs.get("out")
        z = planes.of(logits.to(dtype or logits.dtype))
        mask = z > HIDDEN
        mechanism.refuse_future(mask)
        weights = planes.back(mechanism.normalizer.weights(z.masked_fill(~mask, 0), mask))
        return weights if out is None else out.copy_(weights)

    def _compare(self, known: SoftmaxOf, logits: Tensor, dim: int) -> None:
        """Raise UnsupportedError if a softmax is another one than in the example."""
        if known.terms and dim != known.dim:
            self.refuse(f"takes a softmax over axis {dim}, and in the example over {known.dim}")
        flows = [(f.origin.number, f.factor, f.capped, f.odd) for f in self.flows(logits) if f.origin.kind == "product"]
        flows.sort(key=lambda flow: flow[:2])
        products = [self.known.products[place] for place, *_ in known.terms]
        attends = any(isinstance(product, Product) and product.query is not None for product in products)
        if attends and (odd := [odd for *_, odd in flows if odd]):
            self.refuse(f"takes its logits through {odd[0]} before the softmax")
        same = [
            a[0] == b[0] and same_factor(a[1], b[1], rounded=self.rounded) and a[2] == b[2]
            for a, b in zip(flows, known.terms, strict=False)
        ]
        if len(flows) != len(known.terms) or not all(same):
            found = tuple(flow[:3] for flow in flows)
            self.refuse(
                f"takes a softmax of the products, factors and caps {found}, and in the example of {known.terms}"
            )
        if any(flow.origin in self.unscaled for flow in self.flows(logits)):
            self.refuse("changes its product before it multiplies it by its factor, unlike in the example")

    def _take(self, known: SoftmaxOf, rounds: int) -> list[_Formed]:
        """Return the products of q and k under a softmax, after some whole `rounds`; none for other softmaxes."""
        places = (rounds * len(self.known.products) + place for place, *_ in known.terms)
        return [self.formed.pop(place) for place in places if place in self.formed]

    def _show(self, formed: list[_Formed], logits: Tensor, planes: "_Planes | None", dim: int) -> None:
        """Hand q, k and the logits of a softmax over `dim` to the Monitor."""
        if self.known.shifted:
            for layer in self.mechanism.monitor:
                layer.miss(f"'{self.known.path}' subtracts a number from the logits of each row before the softmax")
            return
        product = formed[0].product
        pairs = [without_factors((one.q, one.k), one.product.undone) for one in formed]
        if planes is None:
            q, k = (torch.cat([x.reshape(1, 1, -1, x.shape[-1]) for x in same], 2) for same in zip(*pairs, strict=True))
            z = logits.movedim(dim, -1).flatten(0, -2)[None, None]
        else:
            (q, k), z = pairs[0], planes.of(logits)
            if product.head is None:
                count = len(product.axes.batch)
                q, k = (x.reshape(math.prod(x.shape[:count]), 1, -1, x.shape[-1]) for x in (q, k))
        for layer in self.mechanism.monitor:
            layer.saw_logits(q, k, z, None if planes is None else z > HIDDEN)


class _Planes:
    """Turns logits of the host, entries of a product of `shape` in the order of `layout`, to [B, H, N, M] and back."""

    def __init__(self, logits: Tensor, product: Product, layout: str, shape: tuple[int, ...]) -> None:
        sizes = dict(zip(product.equation[2], shape, strict=True))
        roles = product.axes[:4]  # batch, heads, queries, keys
        self.turned = _Turn.of(layout, product.axes)
        self.host_shape, self.by_layout = logits.shape, [sizes[s] for s in layout]
        self.by_role = [sizes[s] for role in roles for s in role]
        self.shape = [math.prod(sizes[s] for s in role) for role in roles]

    def of(self, logits: Tensor) -> Tensor:
        """Return logits as [B, H, N, M]."""
        return self.turned.turn(logits.reshape(self.by_layout)).reshape(self.shape)

    def back(self, weights: Tensor) -> Tensor:
        """Return weights [B, H, N, M] in the layout of the host."""
        return self.turned.turn_back(weights.reshape(self.by_role)).reshape(self.host_shape)
