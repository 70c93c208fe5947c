"""The written-out site: a module that forms the product of q and k, its softmax and the product with v by itself.

``inject(model, "quest", example=batch)`` runs the model once on `batch` and follows every product of two activations to
its softmax and on to the values. A module in which all of them are understood becomes a site: its class gets a
subclass, in whose forward the operands of that one product are prepared by the score and the factor of the host gives
way to the score's own. Bias, mask, softmax and dropout stay the host's. With `standard` nothing is touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import is_compiling, refuse_one_token
from ..config import AttentionConfig
from ..mechanisms.base import Score
from ..projections import HeadSizes
from .adapter import Capabilities, mechanism_for
from .following import Comparing, Flow, Origin, same_factor
from .functions import NO_EQUATION, PRODUCTS_AND_SOFTMAX, SOFTMAX, alpha, equation, from_last, is_counted, operands
from .sites import Found, FoundSite, beyond_operands, in_compiled_graph, refuse_checkpoint, site_draft, without
from .universal import ATTENTION_FUNCTIONS

HIDDEN = -5e3  # a logit at or below it is hidden, for normalizers that count what a row sees


class _Turn(NamedTuple):
    """How the axes of an operand are turned to batch, heads, tokens, features, and back; None if they are so."""

    there: tuple[int, ...] | None
    back: tuple[int, ...] | None
    lacks_heads: bool  # one key head for all query heads

    @classmethod
    def of(cls, letters: str, axes: tuple[str, ...]) -> _Turn:
        order = "".join(s for s in "".join(axes) if s in letters)
        pairs = () if order == letters else ((order, letters), (letters, order))
        there, back = (tuple(y.index(s) for s in x) for x, y in pairs) if pairs else (None, None)
        return cls(there, back, axes[1] not in letters)

    def orient(self, x: Tensor) -> Tensor:
        """Return an operand as a mechanism takes it."""
        x = x if self.there is None else x.permute(self.there)
        return x.unsqueeze(1) if self.lacks_heads else x

    def host(self, x: Tensor) -> Tensor:
        """Return an operand as the host takes it."""
        x = x.squeeze(1) if self.lacks_heads else x
        return x if self.back is None else x.permute(self.back)


@dataclass(frozen=True)
class Product:
    """A product of two activations in a module's forward. The last three fields are empty if `query` is None."""

    equation: tuple[str, str, str]  # letters of the axes of both operands and of the result
    query: int | None = None  # which operand is q, 0 or 1; None for a product that stays as it is
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)  # by which the host multiplies q, k and the product
    normed: bool = False  # the host normalizes q, so that its factor on q is a part of q and stays
    head: str | None = None  # the letter of the axis of heads, if it is known
    roles: tuple[int, ...] = field(init=False, compare=False, default=())  # the places of q and k
    # The letters of batch, heads, queries, keys and features.
    axes: tuple[str, ...] = field(init=False, compare=False, default=())
    turns: tuple[_Turn, ...] = field(init=False, compare=False, default=())  # how q and k are turned

    def __post_init__(self) -> None:
        if self.query is None:
            return
        roles = self.query, 1 - self.query
        q, k, result = (self.equation[place] for place in (*roles, 2))
        own = [s for s in result if s in q and s != self.head]
        batch, queries = ("".join(s for s in own if (s in k) is shared) for shared in (True, False))
        keys, features = ("".join(s for s in x if s not in y) for x, y in ((result, q), (q, result)))
        axes = batch, self.head or "", queries, keys, features
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "turns", tuple(_Turn.of(letters, axes) for letters in (q, k)))

    @property
    def undone(self) -> tuple[float, float, float]:
        """The factors that give way to those of a score."""
        return (1.0, *self.factors[1:]) if self.normed else self.factors


@dataclass(frozen=True, kw_only=True)
class Written(Found):
    """The products and softmaxes of one module's forward, which repeats them any number of times."""

    products: tuple[Product | None, ...]  # in order; None for those of weights with values, or with parameters
    # In order, each with the places of its products and their factors; () for others.
    softmaxes: tuple[tuple[tuple[int, float], ...], ...] = ()
    dims: tuple[int, ...] = ()  # of the softmaxes, counted from the last axis
    multiplied: bool = False  # some logits were multiplied by a tensor of zeros and ones, as by a mask
    # The letters of the product in the order in which all logits hold its entries; None if they hold others, or if
    # their softmax is not over all keys.
    layout: str | None = None
    shifted: bool = False  # the host subtracts the largest logit of each row, or the like

    does = "writes attention out"
    flags = (*Found.flags, "multiplied", "shifted")
    optional: ClassVar[Mapping[str, Any]] = {**Found.optional, "layout": None}

    @property
    def asks(self) -> Capabilities:
        """The capabilities that the module needs of a mechanism."""
        return Capabilities(causal=self.causal, cross=self.cross, regroups=False)

    @property
    def sites(self) -> list[Product]:
        """The products whose operands are prepared."""
        return [x for x in self.products if x is not None and x.query is not None]

    @property
    def scale(self) -> float:
        """The host's factor on q·k."""
        return math.prod(self.sites[0].undone)

    def draft(self, module: nn.Module, config: AttentionConfig) -> Any:
        """Return the draft of the module as a site with a mechanism; its parameters are the same objects."""
        made = site_draft(WrittenOut, module, replace(self, query=None))
        sizes = HeadSizes(self.heads, self.kv_heads, self.head_dim, self.head_dim, self.head_dim)
        made.mechanism = mechanism_for(module, config, sizes, self.scale, like=self.query)
        score = made.mechanism.score
        ours = [getattr(type(score), name) is getattr(Score, name) for name in ("forward", "query", "key")]
        made.keeps_queries = all(ours[:2])
        made.untouched = made.mechanism.fused and all(ours) and score.scale(self.head_dim) == self.scale
        return made

    def refusal(self, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the operands of the product and the place of the softmax, or None."""
        if why := beyond_operands(config, softmax=False):
            return why
        for part in config.components:
            if part.learnable and any(product.head is None for product in self.sites):
                return f"'{part.name}' must know the axis of heads, which the example does not show"
            if part.learnable and (self.repeated or len(self.sites) > 1):
                return f"one forward forms more than one product, and '{part.name}' keeps something for each"
            if "queries" in part.reads and any(p.head is None and len(p.axes[2]) > 1 for p in self.sites):
                return f"'{part.name}' must know which axis is that of heads, and two could be those of the queries"
            if part.axis == "normalizer" and not part.fused and self.layout is None:
                return f"'{part.name}' needs logits of queries and keys only, [..., N, M]"
        return None


# --- at run time ------------------------------------------------------------------------------------------------------


class WrittenOut(FoundSite):
    """The class of a site: its products get prepared operands."""

    found_attention: Written
    untouched: bool
    keeps_queries: bool  # the score takes the queries as they are

    def attention_mode(self) -> _Preparing | None:
        """Return the mode that prepares operands, or None where the host computes the same and no Monitor watches."""
        return None if self.untouched and self.mechanism.monitor is None else _Preparing(self)


class _Preparing(Comparing):
    """Prepares the operands of a site's products; in eager code it also compares the way to the softmax."""

    def __init__(self, site: WrittenOut) -> None:
        super().__init__(site)
        self.known = site.found_attention
        self.number = self.softmaxes = 0  # of products and softmaxes so far
        self.mechanism = mechanism = site.mechanism
        self.keeps = not mechanism.fused or mechanism.monitor is not None  # products until their softmax
        self.rounded = False  # an operand has a half type
        self.formed: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]] = {}  # product -> q, k and its shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (known := PRODUCTS_AND_SOFTMAX.get(func)) is not None and is_counted(known, args):
            if not is_compiling() and in_compiled_graph(self.site):
                return func(*args, **kwargs)
            return self._weigh(func, args, kwargs) if known == SOFTMAX else self._multiply(known, func, args, kwargs)
        if self.eager and func in ATTENTION_FUNCTIONS:
            self.refuse(f"calls {ATTENTION_FUNCTIONS[func].name} too")
        return self.call(func, args, kwargs)

    def _is_mask(self, x: Any) -> bool:
        """Return whether a tensor may be a mask that the host multiplies logits by, as it did in the example."""
        return not x.is_floating_point() or self.known.multiplied

    def finish(self) -> None:
        """Raise UnsupportedError unless all products and softmaxes of the example took place."""
        rounds, rest = divmod(self.number, len(self.known.products))
        if rounds == 0 or rest or self.softmaxes != rounds * len(self.known.softmaxes):
            self.refuse(
                f"formed {self.number} products and {self.softmaxes} softmaxes, and the example had "
                f"{len(self.known.products)} and {len(self.known.softmaxes)}"
            )

    def _multiply(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        place = self.number % len(self.known.products)
        self.number += 1
        product = self.known.products[place]
        parts = None if product is None else operands(name, args, kwargs)
        if product is None or parts is None:
            return func(*args, **kwargs)
        head, *pair, rest = parts
        if self.eager:
            if (letters := equation(name, head, *pair) or NO_EQUATION) != product.equation:
                self.refuse(f"forms the product {letters}, and the example {product.equation}")
            refuse_checkpoint(self.known.path, 3)
        if product.query is None:
            out = func(*args, **kwargs)
        else:
            q, k = (turn.orient(pair[role]) for turn, role in zip(product.turns, product.roles, strict=True))
            if self.eager:
                self.rounded |= pair[0].element_size() < 4
                self.compare_factors((pair[role] for role in product.roles), product.factors)
            if not self.site.untouched:
                pair = self._prepare(product, q, k)
            out = func(*head, *pair, **rest)
            if self.keeps:
                self.formed[self.number - 1] = q, k, out.shape
        if self.eager:
            self.note(out, (Flow(Origin("product", place), alpha(rest)), *self.addends(head, rest)))
        return out

    def _prepare(self, product: Product, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return both operands of a product as the score prepares them; q and k have the factors of the host."""
        score: Any = self.mechanism.score
        factors = product.undone
        if self.site.keeps_queries:  # one multiplication in place of two
            factors = (1.0, *factors[1:])
        q, k, scale = score(*without((q, k), factors), k, mask=None, is_causal=False)
        scale = scale / product.factors[2] / product.undone[0] * factors[0]
        made = [product.turns[0].host(q if scale == 1 else q * scale), product.turns[1].host(k)]
        return made if product.query == 0 else made[::-1]

    def _weigh(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits = args[0] if args else kwargs["input"]
        place = self.softmaxes % len(self.known.softmaxes)
        known, dim = self.known.softmaxes[place], kwargs.get("dim", args[1] if len(args) > 1 else None)
        self.softmaxes += 1
        if self.eager:
            if known and (over := from_last(dim, logits.dim())) != self.known.dims[place]:
                self.refuse(f"takes a softmax over axis {over}, and in the example over {self.known.dims[place]}")
            flows = [(f.origin.number, f.factor, f.odd) for f in self.flows(logits) if f.origin.kind == "product"]
            flows.sort(key=lambda flow: flow[:2])
            products = [self.known.products[place] for place, _ in known]
            attends = any(product is not None and product.query is not None for product in products)
            if attends and (odd := [odd for *_, odd in flows if odd]):
                self.refuse(f"takes its logits through {odd[0]} before the softmax")
            same = [
                a[0] == b[0] and same_factor(a[1], b[1], rounded=self.rounded)
                for a, b in zip(flows, known, strict=False)
            ]
            if len(flows) != len(known) or not all(same):
                found = tuple(flow[:2] for flow in flows)
                self.refuse(f"takes a softmax of the products and factors {found}, and in the example of {known}")
        content = self._content(known) if self.keeps else None
        if content is None:
            return func(*args, **kwargs)
        place = 3 if func is F.softmax else 2
        dtype, out = args[place] if len(args) > place else kwargs.get("dtype"), kwargs.get("out")
        mechanism, (product, q, k, shape), planes = self.mechanism, content, None
        if self.known.layout is not None:
            if self.eager and logits.numel() != math.prod(shape):
                self.refuse("takes a softmax of more than its product")
            planes = _Planes(logits, product, self.known.layout, shape)
        if mechanism.monitor is not None and not is_compiling():
            self._show(q, k, logits, planes, product, from_last(dim, logits.dim()))
        if mechanism.fused:
            return func(*args, **kwargs)
        assert planes is not None
        refuse_one_token(mechanism.config, *logits.shape[-2:])
        z = planes.of(logits.to(dtype or logits.dtype))
        mask = z > HIDDEN
        mechanism.refuse_future(mask)
        weights = planes.back(mechanism.normalizer.weights(z.masked_fill(~mask, 0), mask))
        return weights if out is None else out.copy_(weights)

    def _content(self, known: tuple[tuple[int, float], ...]) -> tuple[Product, Tensor, Tensor, tuple[int, ...]] | None:
        """Return the product of q and k under the softmax, its q and k and its shape; None for other softmaxes."""
        start = (self.softmaxes - 1) // len(self.known.softmaxes) * len(self.known.products)
        for place, _ in known:
            product = self.known.products[place]
            if product is not None and product.query is not None and start + place in self.formed:
                return (product, *self.formed.pop(start + place))
        return None

    def _show(self, q: Tensor, k: Tensor, logits: Tensor, planes: _Planes | None, product: Product, dim: int) -> None:
        """Hand q, k and the logits of a softmax to the Monitor."""
        if self.known.shifted:
            for layer in self.mechanism.monitor:
                layer.miss(f"'{self.known.path}' subtracts a number from the logits of each row before the softmax")
            return
        q, k = without((q, k), product.undone)
        if planes is None:
            logits = logits.movedim(dim, -1)
            q, k, z = (x.reshape(1, 1, -1, x.shape[-1]) for x in (q, k, logits))
        else:
            z = planes.of(logits)
            if product.head is None:
                count = len(product.axes[0])
                q, k = (x.reshape(math.prod(x.shape[:count]), 1, -1, x.shape[-1]) for x in (q, k))
        for layer in self.mechanism.monitor:
            layer.saw_logits(q, k, z, None if planes is None else z > HIDDEN)


class _Planes:
    """Turns logits of the host, entries of a product of `shape` in the order of `layout`, to [B, H, N, M] and back."""

    def __init__(self, logits: Tensor, product: Product, layout: str, shape: tuple[int, ...]) -> None:
        sizes = dict(zip(product.equation[2], shape, strict=True))
        groups = product.axes[:4]
        letters = "".join(groups)
        self.host, self.layout = logits.shape, [sizes[s] for s in layout]
        self.there = [layout.index(s) for s in letters]
        self.back_again = [letters.index(s) for s in layout]
        self.split = [sizes[s] for s in letters]
        self.shape = [math.prod(sizes[s] for s in group) for group in groups]

    def of(self, logits: Tensor) -> Tensor:
        """Return logits as [B, H, N, M]."""
        return logits.reshape(self.layout).permute(self.there).reshape(self.shape)

    def back(self, weights: Tensor) -> Tensor:
        """Return weights [B, H, N, M] in the layout of the host."""
        return weights.reshape(self.split).permute(self.back_again).reshape(self.host)
