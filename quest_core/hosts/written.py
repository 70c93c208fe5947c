"""The written-out site: a module that forms the product of q and k, its softmax and the product with v by itself.

``inject(model, "quest", example=batch)`` runs the model once on `batch` and follows every product of two activations to
its softmax and on to the values. A module in which all of them are understood becomes a site: its class gets a
subclass, in whose forward the operands of that one product are prepared by the score and the factor of the host gives
way to the score's own. Bias, mask, softmax and dropout stay the host's. With `standard` nothing is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..compat import is_compiling, is_eager
from ..config import AttentionConfig
from ..errors import UnsupportedError
from ..mechanisms.base import Score
from ..projections import HeadSizes
from .adapter import mechanism_for
from .following import PRODUCTS, SOFTMAX, Following, Origin, alpha, equation, factor_of, name_of, operands
from .sites import FoundSite, refuse_checkpoint, site_draft

HIDDEN = -5e3  # a logit at or below it is hidden, for normalizers that count what a row sees
SAME = 2**-7  # relative difference of factors that are one: a tensor of bfloat16 rounds them


@dataclass(frozen=True)
class Product:
    """A product of two activations in a module's forward.

    Attributes:
        equation: letters of the axes of both operands and of the result.
        query: which operand is q, 0 or 1; None for a product that stays as it is.
        factors: by which the host multiplies q, k and the product.
        normed: the host normalizes q, so that its factor on q is a part of q and stays.
        head: the letter of the axis of heads, if it is known.
    """

    equation: tuple[str, str, str]
    query: int | None = None
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    normed: bool = False
    head: str | None = None

    @property
    def undone(self) -> tuple[float, float, float]:
        """The factors that give way to those of a score."""
        return (1.0, *self.factors[1:]) if self.normed else self.factors

    @property
    def axes(self) -> tuple[str, str, str, str, str]:
        """The letters of batch, heads, queries, keys and features."""
        assert self.query is not None
        q, k, result = self.equation[self.query], self.equation[1 - self.query], self.equation[2]
        head = self.head or ""
        batch, queries = ("".join(s for s in result if s in q and s != head and (s in k) is x) for x in (True, False))
        keys = "".join(s for s in result if s not in q)
        return batch, head, queries, keys, "".join(s for s in q if s not in result)

    def order(self, operand: int) -> str:
        """Return the letters of an operand as a mechanism takes its axes: batch, heads, tokens, features."""
        return "".join(s for s in "".join(self.axes) if s in self.equation[operand])


@dataclass(frozen=True)
class Written:
    """The products and softmaxes of one module's forward, which repeats them any number of times.

    Attributes:
        path: of the module.
        products: all of them in order; None for those of weights with values, or with parameters.
        softmaxes: all of them in order, each with the places of its products and their factors; () for others.
        heads: query heads; 1 where they are not known.
        kv_heads: key/value heads.
        head_dim: features of a query head.
        causal: every later key was hidden.
        cross: queries and keys had different numbers of tokens.
        layout: the letters of the product in the order in which all logits hold its entries; None if they hold others,
            or if their softmax is not over all keys.
        note: a remark for the report.
    """

    path: str
    products: tuple[Product | None, ...]
    softmaxes: tuple[tuple[tuple[int, float], ...], ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    cross: bool = False
    layout: str | None = None
    note: str = field(default="", compare=False)

    @property
    def sites(self) -> list[Product]:
        """The products whose operands are prepared."""
        return [x for x in self.products if x is not None and x.query is not None]

    @property
    def scale(self) -> float:
        """The host's factor on q·k."""
        return math.prod(self.sites[0].undone)

    def joined(self, other: Written) -> Written:
        """Return what two forwards of one module have in common; UnsupportedError if they write another attention."""
        flags: dict[str, Any] = {name: getattr(self, name) or getattr(other, name) for name in ("causal", "cross")}
        flags["layout"] = self.layout if self.layout == other.layout else None
        if replace(self, **flags) != replace(other, **flags):
            raise UnsupportedError(f"'{self.path}' writes its attention in two ways, and a site has one mechanism")
        return replace(self, **flags)


# --- at run time ------------------------------------------------------------------------------------------------------


class WrittenOut(FoundSite):
    """The class of a site: its products get prepared operands."""

    written: Written
    untouched: bool

    def attention_mode(self) -> _Preparing | None:
        """Return the mode that prepares operands, or None where the host computes the same and no Monitor watches."""
        return None if self.untouched and self.mechanism.monitor is None else _Preparing(self)


class _Preparing(Following):
    """Prepares the operands of a site's products; in eager code it also compares the way to the softmax."""

    def __init__(self, site: WrittenOut) -> None:
        super().__init__()
        self.site, self.known, self.softmaxes = site, site.written, 0
        self.eager = is_eager()
        mechanism = site.mechanism
        self.keeps = not mechanism.fused or mechanism.monitor is not None  # products until their softmax
        self.formed: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]] = {}  # product -> q, k and its shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # the one method that Dynamo reads only as a method
            return args[0].unflatten(*args[1:], **kwargs)
        name = name_of(func)
        if name in PRODUCTS:
            return self._multiply(name, func, args, kwargs)
        if name == SOFTMAX:
            return self._weigh(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.eager:
            self.follow(name, func, args, kwargs, out)
        return out

    def finish(self) -> None:
        """Raise UnsupportedError unless all products and softmaxes of the example took place."""
        rounds, rest = divmod(self.number, len(self.known.products))
        if rounds == 0 or rest or self.softmaxes != rounds * len(self.known.softmaxes):
            self._refuse(
                f"formed {self.number} products and {self.softmaxes} softmaxes, and the example had "
                f"{len(self.known.products)} and {len(self.known.softmaxes)}"
            )

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"'{self.known.path}' {what}; its attention is not written as in the example with which "
            f"'{self.site.mechanism.config}' was injected. Inject with an example of this kind"
        )

    def _multiply(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        place = self.number % len(self.known.products)
        self.number += 1
        product, parts = self.known.products[place], operands(name, args, kwargs)
        if product is None or parts is None:
            return func(*args, **kwargs)
        head, a, b, rest = parts
        letters = equation(name, head, a, b)
        if self.eager:
            refuse_checkpoint(self.known.path, 3)
            if letters != product.equation:
                self._refuse(f"forms the product {letters}, and the example {product.equation}")
        if product.query is None:
            out = func(*args, **kwargs)
        else:
            pair, raw = self._prepared(product, [a, b])
            out = func(*head, *pair, **rest)
            if self.keeps:
                self.formed[self.number - 1] = (*raw, out.shape)
        if self.eager:
            self.new(out, Origin("product", name, place), alpha(rest), also=self.added(head, rest))
        return out

    def _prepared(self, product: Product, pair: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return both operands as the score prepares them, and q and k without the factors of the host."""
        assert product.query is not None
        roles = (product.query, 1 - product.query)
        for role, factor, what in zip(roles, product.factors, ("queries", "keys"), strict=False):
            if self.eager:
                given = factor_of(self.flows(pair[role]))
                if given is None or not _same(given, factor):
                    self._refuse(f"multiplies its {what} by {given}, and in the example by {factor:g}")
        turned = [_turned(pair[role], product, role) for role in roles]
        raw = [x if factor == 1 else x * (1 / factor) for x, factor in zip(turned, product.undone, strict=False)]
        if self.site.untouched:
            return pair, raw
        score: Any = self.site.mechanism.score
        q, k, scale = score(*raw, raw[1], mask=None, is_causal=False)
        scale = scale / product.factors[2]
        q = q if scale == 1 else q * scale
        made = [_turned(x, product, role, back=True) for role, x in zip(roles, (q, k), strict=True)]
        return made if product.query == 0 else made[::-1], raw

    def _weigh(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits = args[0] if args else kwargs["input"]
        known = self.known.softmaxes[self.softmaxes % len(self.known.softmaxes)]
        self.softmaxes += 1
        if self.eager:
            flows = [f for f in self.flows(logits) if f.origin.kind == "product"]
            odd = [f.odd for f in flows if f.odd and known]
            if odd:
                self._refuse(f"takes its logits through {odd[0]} before the softmax")
            found = tuple(sorted((f.origin.number, f.factor) for f in flows))
            pairs = [(*one, *two) for one, two in zip(found, known, strict=False)]
            if len(found) != len(known) or any(a != b or not _same(x, y) for a, x, b, y in pairs):
                self._refuse(f"takes a softmax of the products and factors {found}, and in the example of {known}")
        content = self._content(known) if self.keeps else None
        if content is None:
            return func(*args, **kwargs)
        mechanism, (product, q, k, shape), planes = self.site.mechanism, content, None
        if self.known.layout is not None:
            if self.eager and logits.numel() != math.prod(shape):
                self._refuse("takes a softmax of more than its product")
            planes = _Planes(logits, product, self.known.layout, shape)
        if mechanism.monitor is not None and not is_compiling():
            self._show(q, k, logits, planes, product, kwargs.get("dim", args[1] if len(args) > 1 else -1))
        if mechanism.fused:
            return func(*args, **kwargs)
        assert planes is not None
        z = planes.of(logits.to(kwargs.get("dtype") or logits.dtype))
        mask = z > HIDDEN
        mechanism.refuse_future(mask)
        return planes.back(mechanism.normalizer.weights(z.masked_fill(~mask, 0), mask))

    def _content(self, known: tuple[tuple[int, float], ...]) -> tuple[Product, Tensor, Tensor, tuple[int, ...]] | None:
        """Return the product of q and k under the softmax, its raw q and k and its shape; None for other softmaxes."""
        start = (self.softmaxes - 1) // len(self.known.softmaxes) * len(self.known.products)
        for place, _ in known:
            product = self.known.products[place]
            if product is not None and product.query is not None and start + place in self.formed:
                return (product, *self.formed.pop(start + place))
        return None

    def _show(self, q: Tensor, k: Tensor, logits: Tensor, planes: _Planes | None, product: Product, dim: int) -> None:
        """Hand q, k and the logits of a softmax to the Monitor."""
        if planes is None:
            logits = logits.movedim(dim, -1)
            q, k, z = (x.reshape(1, 1, -1, x.shape[-1]) for x in (q, k, logits))
            self.site.mechanism.monitor.saw_logits(q, k, z, None)
            return
        z = planes.of(logits)
        if product.head is None:
            count = len(product.axes[0])
            q, k = (x.reshape(math.prod(x.shape[:count]), 1, -1, x.shape[-1]) for x in (q, k))
        self.site.mechanism.monitor.saw_logits(q, k, z, z > HIDDEN)


class _Planes:
    """Turns logits as the host's softmax takes them to [B, H, N, M], and weights back.

    Args:
        logits: of the host.
        product: whose entries they are, in the order of `layout`.
        shape: of the product.
    """

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


def _turned(x: Tensor, product: Product, operand: int, *, back: bool = False) -> Tensor:
    """Return an operand with its axes as a mechanism takes them, or turned `back`."""
    letters, order = product.equation[operand], product.order(operand)
    places = [letters.index(letter) for letter in order]
    lacks_heads = product.head is not None and product.head not in letters  # one key head for all query heads
    if back:
        x = x.squeeze(1) if lacks_heads else x
        return x.permute([order.index(letter) for letter in letters])
    x = x.permute(places)
    return x.unsqueeze(1) if lacks_heads else x


def _same(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=SAME)


def prepare(module: nn.Module, written: Written, config: AttentionConfig) -> nn.Module:
    """Return the draft of `module` as a site; `written` describes its products."""
    made = site_draft(WrittenOut, module)
    sizes = HeadSizes(written.heads, written.kv_heads, written.head_dim, written.head_dim, written.head_dim)
    made.written = written
    made.mechanism = mechanism_for(module, config, sizes, written.scale)
    made.untouched = made.mechanism.fused and _is_host(made.mechanism.score, written)
    return made  # type: ignore[no-any-return]


def _is_host(score: Score, written: Written) -> bool:
    """Return whether a score neither prepares operands nor scales them in another way than the host."""
    plain = all(getattr(type(score), name) is getattr(Score, name) for name in ("query", "key", "forward"))
    return plain and score.scale(written.head_dim) == written.scale
