"""Part: the declaration of a mechanism; core reads the declaration and never asks for a name or a class."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError, one_of

NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
AXES = ("score", "normalizer", "grouping", "family")

READS = {
    "tokens": "several tokens, outside of scaled_dot_product_attention",
    "queries": "other queries, so padding must be hidden as a query too",
    "unseen": "keys that a mask hides from the query and not from all others",
    "group": "other query heads of the same key/value head",
    "heads": "other key/value heads",
    "samples": "other samples of the batch",
    "order": "the positions of tokens",
    "length": "the number of tokens, those that a mask hides included",
    "random": "random numbers of its own, drawn in evaluation or in training",
}
"""What the result of a query may depend on except itself and the keys that it sees."""

_ONLY = {"normalizer": "dropout fused", "score": "unit_keys chained", "family": "key_features compares grid"}

CAUSAL: dict[str, Any] = {"causal": True, "cross": True, "cached": True}
"""The declaration of what attends causally, to other sequences, and with a cache."""

POINTWISE: dict[str, Any] = {**CAUSAL, "reads": ()}
"""The declaration of a score that prepares each token of each head for itself."""

MIXING: dict[str, Any] = {**CAUSAL, "reads": ("tokens",)}
"""The declaration of what looks at several tokens outside of scaled_dot_product_attention."""


@dataclass(frozen=True)
class Option:
    """One option of a part: its name, type, default and the values it takes.

    Attributes:
        starts: set by the option in a fresh model: "q" or "k", the expected norm of a head's queries or keys;
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
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text without ( ) ,"}
            words = kinds[self.kind]
            if self.minimum is not None:
                words += f" of at least {self.minimum:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any, owner: str) -> Any:
        """Return `value` as this option's type; raise ConfigError naming the key, the value and what is allowed."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        good: Any = None  # until `value` fits
        if self.kind is int and number and (isinstance(value, int) or value.is_integer()):
            good = int(value)
        elif self.kind is float and number and abs(value) < 1e308:
            good = float(value)
        elif self.kind in (bool, str) and isinstance(value, self.kind) and (not self.choices or value in self.choices):
            good = self.kind(value) if self.kind is bool or not set("(),") & set(str(value)) else None
        low = good is not None and self.minimum is not None and good < self.minimum
        if low or (good is None and not (value is None and self.nullable)):
            raise ConfigError(f"attention '{owner}': option '{self.name}' is {value!r}, but takes {self.allowed}")
        return good


@dataclass(frozen=True)
class Part:
    """One named choice on one axis, declared as data: all that core knows of it.

    The declarations are promises. What is not declared is refused by name wherever it is asked for, so a Part with the
    defaults is slow and lonely but right. :func:`quest_core.testing.check_mechanism` tests every promise.

    Attributes:
        name: what users write: letters, digits, dots, hyphens.
        axis: one of AXES.
        summary: the formula, in a line.
        source: paper and equation.
        build: ``build(dims, **options)`` returns a Score, Normalizer, Grouping or Family, as `axis` says; `dims` is
            None where heads and features are unknown.
        options: its options.
        reference: the formula in plain float64, as slow as it likes; its arguments: https://quest-attention.github.io/quest/writing-a-mechanism/
            Those of our own mechanisms stand in :mod:`quest_core.testing.references`.
        complexity: time and memory, as a text.
        causal: with ``is_causal`` no output depends on a key of the future.
        causal_reason: why it cannot be causal; part of the error message.
        cross: keys may be another sequence than the queries, of another length.
        cached: decoding with a Cache, in pieces of any size, equals the causal forward pass on all tokens.
        dropout: normalizer: its `forward` drops weights as `dropout_p` says.
        fused: normalizer: it is the softmax of `scaled_dot_product_attention`, so a fused kernel may take its place.
        unit_keys: score: it prepares keys as k/‖k‖, so that a host's cache may hold those.
        reads: keys of READS, on which a result depends besides its own query and the keys that this query sees. All of
            them unless declared; () is a score that prepares each token of each head for itself.
        learnable: has parameters.
        stateful: has buffers that change while training.
        stops_gradient: stops a gradient on purpose, so that gradients differ from finite differences.
        chained: score: reads what the previous attention layer left behind; its module has the methods `follow` and
            `arranged` of :class:`quest_core.mechanisms.elliptical.Elliptical`.
        reshapes: changes the shape of the host's projections.
        key_features: family: features of a key head where they differ from the query's.
        compares: family: which share a key has depends on the query that asks, as in q·k; rotary positions act there.
        grid: family: tokens lie on a grid; the options are `dims`, `grid` and `prefix`, and hosts assign the last two.
    """

    name: str
    axis: str
    summary: str
    source: str
    build: Callable[..., Any]
    options: tuple[Option, ...] = ()
    reference: Callable[..., Any] | None = None
    complexity: str = "O(N·M·D) time, O(N + M) memory through a fused kernel"
    causal: bool = False
    causal_reason: str = "its Part does not declare causal=True"
    cross: bool = False
    cached: bool = False
    dropout: bool = False
    fused: bool = False
    unit_keys: bool = False
    reads: tuple[str, ...] = tuple(READS)
    learnable: bool = False
    stateful: bool = False
    stops_gradient: bool = False
    chained: bool = False
    reshapes: bool = False
    key_features: int | None = None
    compares: bool = False
    grid: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError unless every field has its type and the fields fit together."""
        for item in fields(self):
            value = getattr(self, item.name)
            wanted = {"str": "a text", "bool": "True or False"}.get(str(item.type))
            if wanted and type(value).__name__ != item.type:
                self._refuse(item.name, value, wanted)
        listed = isinstance(self.options, tuple) and all(isinstance(option, Option) for option in self.options)
        features = self.key_features is None or (type(self.key_features) is int and self.key_features > 0)
        known = isinstance(self.reads, tuple) and set(self.reads) <= set(READS)
        for key, fits, wanted in (
            ("name", NAME.fullmatch(self.name), "letters, digits, '.', '-' and '_', starting with a letter"),
            ("axis", self.axis in AXES, one_of(self.axis, AXES)),
            ("build", callable(self.build), "a function"),
            ("reference", self.reference is None or callable(self.reference), "a function"),
            ("options", listed, "a tuple of Option, such as (SCALE,)"),
            ("reads", known, f"a tuple of {', '.join(READS)}"),
            ("key_features", features, "a whole number of at least 1, or None"),
            ("cached", self.causal or not self.cached, "for causal mechanisms only; declare causal=True too"),
        ):
            if not fits:
                self._refuse(key, getattr(self, key), wanted)
        for axis, keys in _ONLY.items():
            for key in keys.split():
                if getattr(self, key) and self.axis != axis:
                    self._refuse(key, getattr(self, key), f"for the axis {axis} only; this is a {self.axis}")
        for option in self.options:
            if not str(option.name).isidentifier() or option.name == "name":
                self._refuse("the name of an option", option.name, "letters, digits and '_', but not 'name'")
            for key, allowed in (("kind", (int, float, bool, str)), ("starts", (None, "q", "k", "own"))):
                if getattr(option, key) not in allowed:
                    self._refuse(f"the {key} of option '{option.name}'", getattr(option, key), f"one of {allowed}")
            option.check(option.default, self.name)
        names = [option.name for option in self.options]
        if len(set(names)) < len(names):
            self._refuse("options", names, "options of different names")

    def _refuse(self, key: str, value: Any, wanted: str) -> None:
        raise ConfigError(f"Part {self.name!r}: {key} is {value!r}; it is {wanted}")

    @property
    def drops(self) -> bool:
        """Whether dropout on the weights is possible with it; scores and groupings leave that to the normalizer."""
        return self.dropout or self.axis in ("score", "grouping")

    @property
    def weights(self) -> bool:
        """Whether the weights [B, H, N, M] can be returned with it; a family never forms them."""
        return self.axis != "family"
