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

from ..compat import is_eager
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

    def order(self, operand: int) -> str:
        """Return the letters of an operand as a mechanism takes its axes: batch, heads, tokens, features."""
        one, two, result = self.equation
        letters, shared = self.equation[operand], {self.head, *one} & {self.head, *two}
        own = sorted((x for x in result if x in letters), key=lambda x: x not in shared)
        return "".join(own) + "".join(x for x in letters if x not in result)


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
        plane: the last axes of all logits are queries and keys, and every entry comes from a product.
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
    plane: bool = True
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
        flags = {name: getattr(self, name) or getattr(other, name) for name in ("causal", "cross")}
        flags["plane"] = self.plane and other.plane
        if replace(self, **flags) != replace(other, **flags):
            raise UnsupportedError(f"'{self.path}' writes its attention in two ways, and a site has one mechanism")
        return replace(self, **flags)


# --- at run time ------------------------------------------------------------------------------------------------------


class WrittenOut(FoundSite):
    """The class of a site: its products get prepared operands."""

    written: Written
    untouched: bool

    def attention_mode(self) -> _Preparing | None:
        """Return the mode that prepares operands, or None where the host computes the same."""
        if self.mechanism.monitor is not None:
            raise UnsupportedError(f"a Monitor does not see '{self.written.path}', whose attention is written out")
        return None if self.untouched else _Preparing(self)


class _Preparing(Following):
    """Prepares the operands of a site's products; in eager code it also compares the way to the softmax."""

    def __init__(self, site: WrittenOut) -> None:
        super().__init__()
        self.site, self.known, self.softmaxes = site, site.written, 0
        self.eager = is_eager()

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
            pair = self._prepared(product, [a, b])
            out = func(*head, *pair, **rest)
        if self.eager:
            self.new(out, Origin("product", name, place), alpha(rest), also=self.added(head, rest))
        return out

    def _prepared(self, product: Product, pair: list[Tensor]) -> list[Tensor]:
        """Return both operands, prepared by the score, with the factors of the host undone."""
        assert product.query is not None
        roles = (product.query, 1 - product.query)
        score: Any = self.site.mechanism.score
        for role, factor, what in zip(roles, product.factors, ("queries", "keys"), strict=False):
            if self.eager:
                given = factor_of(self.flows(pair[role]))
                if given is None or not _same(given, factor):
                    self._refuse(f"multiplies its {what} by {given}, and in the example by {factor:g}")
        q, k = (_turned(pair[role], product, role) for role in roles)
        undone = [x if factor == 1 else x * (1 / factor) for x, factor in zip((q, k), product.undone, strict=False)]
        q, k, scale = score(undone[0], undone[1], undone[1], mask=None, is_causal=False)
        scale = scale / product.factors[2]
        q = q if scale == 1 else q * scale
        for role, x in zip(roles, (q, k), strict=True):
            pair[role] = _turned(x, product, role, back=pair[role].dim())
        return pair

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
        if not known or self.site.mechanism.fused:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or logits.dtype
        return self._normalized(logits.to(dtype))

    def _normalized(self, logits: Tensor) -> Tensor:
        """Return the weights of a normalizer that takes the place of the softmax; logits [..., N, M]."""
        seen = logits > HIDDEN
        plane = logits.reshape(-1, 1, *logits.shape[-2:])
        mask = seen.reshape(plane.shape)
        self.site.mechanism.refuse_future(mask)
        weights: Tensor = self.site.mechanism.normalizer.weights(plane.masked_fill(~mask, 0), mask)
        return weights.reshape(logits.shape)


def _turned(x: Tensor, product: Product, operand: int, back: int | None = None) -> Tensor:
    """Return an operand with its axes as a mechanism takes them, or, with the number of its axes, turned `back`."""
    letters, order = product.equation[operand], product.order(operand)
    places = [letters.index(letter) for letter in order]
    lacks_heads = product.head is not None and product.head not in letters  # one key head for all query heads
    if back is not None:
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
