"""Part: what a mechanism declares of itself; core reads the declaration and never asks for a name or a class."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One option of a part: its name, type, default and the values it takes.

    Attributes:
        starts: what the option sets in a fresh model only: "q" or "k", the expected norm of a head's queries or keys;
            "own", the part's own parameters; None for an option that changes the function itself. A checkpoint does
            not depend on options that only set a start.
    """

    name: str
    kind: type  # int, float, bool or str
    default: Any
    doc: str
    minimum: float | None = None
    nullable: bool = False
    choices: tuple[str, ...] = ()
    starts: str | None = None

    @property
    def allowed(self) -> str:
        """The values this option takes, in words for an error message."""
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        else:
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[self.kind]
            if self.minimum is not None:
                words += f" of at least {self.minimum:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any, owner: str) -> Any:
        """`value` as this option's type; raises ConfigError naming the key, the value and what is allowed."""
        good = value
        if value is None:
            if self.nullable:
                return None
        elif self.kind is bool:
            if isinstance(value, bool):
                return value
        elif self.kind is int:
            if isinstance(value, float) and value.is_integer():
                good = int(value)
            if isinstance(good, int) and not isinstance(good, bool) and self._large_enough(good):
                return good
        elif self.kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                good = float(value)
                if math.isfinite(good) and self._large_enough(good):
                    return good
        elif isinstance(value, str) and (not self.choices or value in self.choices):
            return value
        raise ConfigError(f"attention '{owner}': option '{self.name}' is {value!r}, but takes {self.allowed}")

    def _large_enough(self, value: float) -> bool:
        return self.minimum is None or value >= self.minimum


@dataclass(frozen=True)
class Part:
    """One named choice on one axis, declared as data: what `quest list` and the support table show."""

    name: str
    axis: str  # "score", "normaliser", "grouping" or "family"
    summary: str  # the formula, in a line
    source: str  # paper and equation
    build: Callable[..., Any]  # (dims, **options) -> nn.Module
    options: tuple[Option, ...] = ()
    learnable: bool = False  # adds parameters
    stateful: bool = False  # keeps buffers that change while training
    reshapes: bool = False  # changes the shape of the host's projections
    causal: bool = True
    causal_reason: str = ""  # why not, for those that cannot
    cross: bool = True
    ordered: bool = False  # needs an order of tokens: refused on sets and graphs
    cached: bool = True  # incremental decoding
    dropout: bool = True  # has weights that dropout can act on
    weights: bool = True  # can return the attention weights
    chained: bool = False  # reads what the previous attention layer left behind
    counts_queries: bool = False  # a query's result depends on the other queries, so padding must be told of them too
    mixes_tokens: bool = False  # reads several tokens outside of scaled_dot_product_attention
    key_features: int | None = None  # features of a key head where they differ from the query's
    complexity: str = "O(N·M·D) time, O(N + M) memory through a fused kernel"
