"""Every mechanism by name: a class that declares with attributes what core may rely on.

>>> @register("quest", source="QUEST, section 2.1", options=(SCALE,))
... class Quest(Score): ...

An installed package names a module under the entry-point group `quest.attention`; importing the module registers its
classes. Such packages are imported when a name is unknown or when all names are needed.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .errors import ConfigError, one_of

AXES = ("score", "normalizer", "grouping", "score_mod", "output", "family")

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
"""Further inputs that the output of a query may depend on, besides the query and its visible keys."""


@dataclass(frozen=True)
class Option:
    """One option of a mechanism: its name, type, default and allowed values.

    Attributes:
        starts: initialized by the option in a fresh model: "q" or "k", the expected norm of a head's queries or
            keys; "own", the mechanism's own parameters; None if the option changes the function itself. A checkpoint
            does not depend on options that only initialize.
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
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text without ( ) , ;"}
            words = kinds[self.kind]
            if self.minimum is not None:
                words += f" of at least {self.minimum:g}"
        return words + (" or null" if self.nullable else "")

    def check(self, value: Any, owner: str) -> Any:
        """Return `value` as this option's type; raise ConfigError naming the key, the value and what is allowed."""
        if value is None and self.nullable:
            return None
        if not self._allows(value):
            raise ConfigError(f"attention '{owner}': option '{self.name}' is {value!r}, but takes {self.allowed}")
        return self.kind(value)

    def _allows(self, value: Any) -> bool:
        """Return whether `value` is one of `allowed`; a float without fraction is a whole number."""
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            if not isinstance(value, str) or set("(),;") & set(value):
                return False
            return not self.choices or value in self.choices
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:
            return False
        whole = isinstance(value, int) or value.is_integer()
        return (self.kind is float or whole) and (self.minimum is None or value >= self.minimum)


@dataclass(frozen=True)
class Dims:
    """Sizes that a component may need when it is built."""

    num_heads: int  # query heads H
    kv_heads: int  # key/value heads G
    head_dim: int  # features D per query/key head
    standard_scale: float | None = None  # the factor of a standard score, where a host's is not 1/√D


class Component(nn.Module):
    """Base of the classes in `mechanisms.base`; its class attributes are the promises of a mechanism.

    The defaults promise nothing: core raises UnsupportedError for anything that is not promised, so a mechanism with
    the defaults is safe, but most hosts do not accept it. A subclass inherits the promises of its base.
    :func:`quest_core.testing.check_mechanism` tests each promise.

    An instance is built as ``cls(dims, **options)``; `dims` is None if heads and features are unknown. A subclass with
    options or parameters overrides `__init__`.
    """

    name: ClassVar[str]
    """What users write; set by `register`, as are `source` and `options`."""
    source: ClassVar[str]
    """Paper and equation."""
    options: ClassVar[tuple[Option, ...]] = ()
    axis: ClassVar[str]
    """One of AXES; set by the base class."""

    causal: ClassVar[bool] = False
    """With ``is_causal`` no output depends on a later key."""
    causal_reason: ClassVar[str] = "its class does not declare causal = True"
    """Why it cannot be causal; part of the error message."""
    cross: ClassVar[bool] = False
    """Keys may be another sequence than the queries, of another length."""
    cached: ClassVar[bool] = False
    """Decoding with a Cache, in pieces of any size, equals the causal forward pass on all tokens."""
    reads: ClassVar[tuple[str, ...]] = tuple(READS)
    """Keys of READS; () is a part that treats each token of each head independently."""
    dropout: ClassVar[bool] = False
    """Dropout on the weights is possible."""
    learnable: ClassVar[bool] = False
    """Has parameters."""
    stateful: ClassVar[bool] = False
    """Has buffers that change during training. Converting the model leaves them in float32."""
    stops_gradient: ClassVar[bool] = False
    """Stops a gradient on purpose, so that gradients differ from finite differences."""
    reshapes: ClassVar[bool] = False
    """Changes the shape of the host's projections."""
    fused: ClassVar[bool] = False
    """Normalizer: is the softmax of `scaled_dot_product_attention`, so a fused kernel may replace it. ScoreMod:
    is a bias, which such a kernel takes as a mask."""
    unit_keys: ClassVar[bool] = False
    """Score: prepares keys as k/‖k‖, so that a host's cache may hold those."""
    chained: ClassVar[bool] = False
    """Score: reads values of the previous attention layer, through the methods `follow` and `token_order` of
    :class:`quest_core.mechanisms.elliptical.Elliptical`."""
    key_features: ClassVar[int | None] = None
    """Family: features of a key head, if they differ from the query's."""
    compares: ClassVar[bool] = False
    """The weight of a key depends on the query, as in q·k. Hosts with rotary positions require it."""
    on_grid: ClassVar[bool] = False
    """Family: tokens lie on a grid; the options are `dims`, `grid` and `prefix`, and hosts assign the last two."""
    needs_input: ClassVar[bool] = False
    """ScoreMod, Output: reads the layer's input x [B, N, H·D], which not every host hands on."""
    complexity: ClassVar[str] = "O(N·M·D) time, O(N + M) memory through a fused kernel"
    """Time and memory."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    @classmethod
    def formula(cls) -> str:
        """Return the first line of the class docstring, without its period."""
        return (cls.__doc__ or "").strip().partition("\n")[0].removesuffix(".")

    @classmethod
    def leaves_softmax(cls) -> bool:
        """Whether a host's own call of softmax attention computes it, given what the score prepares."""
        return cls.axis in ("score", "grouping") or (cls.axis == "normalizer" and cls.fused)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Component":
        before = dict(self._buffers) if self.stateful else {}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, was in before.items():
            now = self._buffers[name]
            if was is not None and now is not None and was.dtype == torch.float32 != now.dtype:
                self._buffers[name] = was.to(now.device)  # half precision rounds the step of a moving average away
        return self


C = TypeVar("C", bound=type[Component])
_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_mechanisms: dict[str, type[Component]] = {}
registrations = 0  # their number; a mechanism that was built by name before the latest may be of an old class


def register(name: str, *, source: str, options: tuple[Option, ...] = ()) -> Callable[[C], C]:
    """Return a class decorator that makes a subclass of Component available as ``attention=name``.

    Args:
        name: ASCII letters, digits, dots, hyphens and underscores, starting with a letter.
        source: paper and equation.
        options: the keywords of its `__init__` besides `dims`.

    Raises:
        ConfigError: a name that is taken, or a declaration that does not fit.
    """

    def decorate(cls: C) -> C:
        for what, fits, expected in (
            ("name", _NAME.fullmatch(name), "letters, digits, '.', '-' and '_', starting with a letter"),
            ("base class", hasattr(cls, "axis"), "Score, Normalizer, Grouping, ScoreMod, Output or Family"),
            ("name", "name" not in vars(cls), f"new; {cls.__name__} is registered already, so make a subclass"),
            ("reads", isinstance(cls.reads, tuple) and set(cls.reads) <= {*READS}, f"a tuple of {', '.join(READS)}"),
            ("cached", cls.causal or not cls.cached, "for causal mechanisms only; declare causal = True too"),
            ("options", len({o.name for o in options}) == len(options), "options of different names"),
        ):
            if not fits:
                raise ConfigError(f"mechanism '{name}' ({_path(cls)}): {what} must be {expected}")
        for option in options:
            option.check(option.default, name)
        for other in _mechanisms.values():
            again = _path(other) == _path(cls)  # a cell of a notebook runs twice
            if _canonical(other.name) == _canonical(name) and not again:
                raise ConfigError(
                    f"{_path(cls)}: name '{name}' is taken by '{other.name}' of {_path(other)}; choose another"
                )
        global registrations
        registrations += 1
        cls.name, cls.source, cls.options = name, source, options
        _mechanisms[name] = cls
        return cls

    return decorate


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _canonical(name: str) -> str:
    """Names that differ only in case or in ``-``, ``_`` and ``.`` are the same: a misspelt one must be an error."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Package:
    """An installed distribution with mechanisms."""

    owner: str  # the distribution and its version
    module: str  # that its entry point names
    problem: str = ""  # why it cannot be imported

    @property
    def fix(self) -> str:
        """The command that ends the problem; empty if there is none."""
        name = self.owner.partition(" ")[0]
        return f"pip install --upgrade {name}, or pip uninstall {name}" if self.problem else ""

    def __str__(self) -> str:
        return f"{self.owner} ({self.module})" + (f": {self.problem}; fix: {self.fix}" if self.problem else "")


@functools.cache
def packages() -> tuple[Package, ...]:
    """Import every installed package with mechanisms, once; a package that raises is a record with its cause."""
    found = []
    for point in sorted(entry_points(group="quest.attention"), key=lambda point: (point.name, point.value)):
        owner, problem = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown", ""
        try:
            point.load()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        found.append(Package(owner, point.value, problem))
    return tuple(found)


def mechanisms() -> Mapping[str, type[Component]]:
    """Return every mechanism by name: those of quest_core, registered ones and those of installed packages."""
    packages()
    return _mechanisms


def find(name: str) -> type[Component]:
    """Return the mechanism of a name; ConfigError with the nearest names and the packages that cannot be used."""
    if name not in _mechanisms and name not in mechanisms():
        broken = [f"; not usable: {package}" for package in packages() if package.problem]
        raise ConfigError(
            f"attention: '{name}' is not a mechanism; {one_of(name, _mechanisms)}{''.join(broken)}; "
            "quest-zoo and other packages have more: https://quest-attention.github.io/quest/mechanisms/"
        )
    return _mechanisms[name]


def owner(mechanism: type[Component]) -> str:
    """Return "quest-core", or the distribution of a mechanism and its version: "quest-power 0.1.0", "notebook ?"."""
    module = mechanism.__module__.partition(".")[0]
    owners = {package.module.partition(".")[0]: package.owner for package in packages()}
    return "quest-core" if module == "quest_core" else owners.get(module, f"{module} ?")


def list_mechanisms() -> list[str]:
    """Return the names that `attention=` accepts, alone or joined by '+': of scores, families and all other parts."""
    return sorted(mechanisms())


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Forget at the end of the block what is registered inside it, for tests."""
    global registrations
    before = dict(mechanisms())
    try:
        yield
    finally:
        _mechanisms.clear()
        _mechanisms.update(before)
        registrations += 1
        packages.cache_clear()
