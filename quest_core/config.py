"""AttentionConfig: one grammar for attention in Python, yaml, JSON and on command lines.

All of these mean the same::

    "quest+gqa(kv_heads=4)"
    {"name": "quest", "kv_heads": 4}              # kv_heads, or ratio, without a grouping means gqa
    '{"name": "quest", "kv_heads": 4}'            # JSON, as a command line passes it

Options are separated by ``,`` or ``;``, because some command lines (mmengine, Pointcept) split values at commas. A name
is one or more components joined by ``+``, at most one per axis (score, normalizer, grouping, score_mod, output). The
first three are standard, softmax and mha if left out, the last two nothing. Families (linear, ...) are not combined.
An option inside the brackets of a component that has it is that component's; where two components have an option of
one name, a mapping says which is meant by ``{"entmax.alpha": 1.3}``.
"""

import ast
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from .errors import ConfigError, one_of
from .mechanisms.base import Dims
from .registry import AXES, Component, Option, find, mechanisms

C = TypeVar("C", bound=Component)
DEFAULTS = {"score": "standard", "normalizer": "softmax", "grouping": "mha"}


@dataclass(frozen=True)
class AttentionConfig:
    """A validated choice of attention. Build it with :meth:`parse`; equal configurations compare and hash equal.

    Attributes:
        parts: pairs of an axis and a name: of the score, normalizer, grouping and other axes, or only of the family.
        options: the options that were given, checked and converted; defaults are not filled in.
    """

    parts: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, spec: "AttentionSpec") -> "AttentionConfig":
        """Read a name, ``name(key=value)``, a mapping, JSON text or an AttentionConfig.

        Raises:
            ConfigError: naming the key, the value, the valid choices and the nearest spelling.
        """
        if isinstance(spec, AttentionConfig):
            return spec
        if isinstance(spec, str) and spec.strip().startswith("{"):
            try:
                spec = json.loads(spec)
            except json.JSONDecodeError as error:
                raise ConfigError(f"attention {spec!r} starts like JSON but is not: {error}") from None
        if isinstance(spec, str):
            return _validate(*_read_text(spec))
        if isinstance(spec, Mapping):
            if not isinstance(spec.get("name"), str):
                raise ConfigError(
                    f"attention {dict(spec)!r} has no 'name'; write for example {{'name': 'quest', 'kv_heads': 4}}"
                )
            names, options = _read_text(spec["name"])
            return _validate(names, options + [(str(key), value) for key, value in spec.items() if key != "name"])
        raise ConfigError(
            f"attention is {spec!r} ({type(spec).__name__}); write a name such as 'quest', "
            "a mapping such as {'name': 'quest', 'kv_heads': 4}, or 'quest+gqa(kv_heads=4)'"
        )

    @property
    def family(self) -> str | None:
        """The family's name, or None for a combination."""
        return dict(self.parts).get("family")

    @property
    def name(self) -> str:
        """The shortest name that means this choice of parts: 'quest', 'quest+gqa', 'standard'."""
        if self.family:
            return self.family
        chosen = [name for axis, name in self.parts if DEFAULTS.get(axis) != name]
        return "+".join(chosen) or DEFAULTS["score"]

    def __getitem__(self, axis: str) -> str:
        return dict(self.parts)[axis]

    @property
    def components(self) -> tuple[type[Component], ...]:
        """The classes of its parts: first the score, then the normalizer and the grouping; or the family."""
        return tuple(find(name) for _, name in self.parts)

    def option(self, key: str) -> Any:
        """Return the value of an option: the one given or its default; None if no component has the option.

        "entmax.alpha" names the component too; without it, the last component that has the option counts.
        """
        owner, _, name = key.rpartition(".")
        found = [c for c in self.components if owner in ("", c.name) for o in c.options if o.name == name]
        return self._values(found[-1])[name] if found else None

    def _values(self, component: type[Component]) -> dict[str, Any]:
        """Return the value of each option of a component: the one given or its default."""
        given = dict(self.options)
        own = {o.name: given.get(o.name, o.default) for o in component.options}
        return own | {name: given[key] for name in own if (key := f"{component.name}.{name}") in given}

    @property
    def needs_input(self) -> bool:
        """Whether it reads the layer's input."""
        return any(part.needs_input for part in self.components)

    @property
    def is_standard(self) -> bool:
        """Whether it is the attention of every host; adapters then keep its exact rounding and its checkpoints."""
        return self.means(STANDARD)

    def means(self, spec: "AttentionSpec") -> bool:
        """Return whether `spec` is this attention; False if it is unknown here.

        An omitted option equals its default. Options that only initialize a fresh model are not compared.
        """
        try:
            other = AttentionConfig.parse(spec)
        except ConfigError:
            return False
        compared = [(c, o.name) for c in self.components for o in c.options if o.starts is None]
        return self.parts == other.parts and all(self._values(c)[x] == other._values(c)[x] for c, x in compared)

    @property
    def initial_norms(self) -> dict[str, float]:
        """Norms of queries ("q") and keys ("k") in a fresh model, if options set them; see `projections.init_norms`."""
        options = ((self._values(c)[o.name], o.starts) for c in self.components for o in c.options)
        return {role: norm for norm, role in options if role in ("q", "k") and norm is not None}

    def without_initial_norms(self) -> "AttentionConfig":
        """Return the same attention without the options that only set initial norms."""
        owned = [(c.name, o.name) for c in self.components for o in c.options if o.starts in ("q", "k")]
        names = {name for owner, option in owned for name in (option, f"{owner}.{option}")}
        return replace(self, options=tuple((key, value) for key, value in self.options if key not in names))

    def build(self, component: type[C], dims: Dims | None) -> C:
        """Return a new `component` with the options of this configuration, defaults filled in."""
        given = self._values(component)
        return component(dims, **{o.name: given[o.name] for o in component.options if o.starts not in ("q", "k")})

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping of plain JSON types that :meth:`parse` reads back to an equal configuration."""
        return {"name": self.name, **dict(self.options)}

    def __str__(self) -> str:
        """Return the one-line text that :meth:`parse` reads back."""
        inside = ", ".join(f"{key}={_write_value(x)}" for key, x in self.options)
        return f"{self.name}({inside})" if inside else self.name


AttentionSpec: TypeAlias = str | Mapping[str, Any] | AttentionConfig
"""What every `attention=` argument accepts."""

STANDARD = AttentionConfig(tuple(DEFAULTS.items()))
"""The attention of every host; a part that a name leaves out is the part of this one."""


_TERM = r"\s*([A-Za-z][\w.-]*)\s*(?:\(([^()]*)\))?\s*"  # name or name(...)


def _read_text(text: str) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return names and options: 'quest+gqa(kv_heads=4)' -> (['quest', 'gqa'], [('gqa.kv_heads', 4)])."""
    text = text.strip()
    if not re.fullmatch(rf"{_TERM}(\+{_TERM})*", text):
        raise ConfigError(
            f"attention {text!r} cannot be read; write a name, name(key=value, ...), name(key=value; ...) or names "
            "joined by '+', such as 'quest+gqa(kv_heads=4)'"
        )
    names: list[str] = []
    options: list[tuple[str, Any]] = []
    for name, inside in re.findall(_TERM, text):
        names.append(name)
        for item in filter(None, map(str.strip, re.split("[,;]", inside))):
            key, _, value = (piece.strip() for piece in item.partition("="))
            if not value:
                raise ConfigError(f"attention {text!r}: {item!r} is not key=value")
            own = any(o.name == key for o in find(name).options)
            options.append((f"{name}.{key}" if own else key, _read_value(value)))
    return names, options


def _read_value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _write_value(value: Any) -> str:
    """Return the text that `_read_value` reads back: '14x14' as it is, and '196', which would be a number, quoted."""
    if isinstance(value, str):
        return value if _read_value(value.strip() or "0") == value else repr(value)
    return json.dumps(value)


def _validate(names: list[str], options: list[tuple[str, Any]]) -> AttentionConfig:
    """Return the configuration of what `_read_text` has read, or of the items of a mapping."""
    written = "+".join(names)
    chosen = _choose(written, names, shares_heads=any(key in ("kv_heads", "ratio") for key, _ in options))
    checked: dict[str, Any] = {}
    for given, value in options:
        key, option = _find_option(written, given, chosen.values())
        if key in checked:
            raise ConfigError(f"attention '{written}': option '{key}' is given twice; keep one")
        checked[key] = option.check(value, written)
    parts = tuple((axis, component.name) for axis, component in chosen.items())
    return AttentionConfig(parts, tuple(sorted(checked.items())))


def _choose(written: str, names: list[str], *, shares_heads: bool) -> dict[str, type[Component]]:
    """Return the component of each axis in the order of AXES; if one `shares_heads`, the default grouping is gqa."""
    chosen: dict[str, type[Component]] = {}
    for component in map(find, names):
        axis = component.axis
        if axis in chosen:
            raise ConfigError(
                f"attention '{written}' names two choices for the {axis}: '{chosen[axis].name}' and "
                f"'{component.name}'; keep one"
            )
        chosen[axis] = component
    if "family" in chosen and len(chosen) > 1:
        others = ", ".join(f"'{component.name}'" for axis, component in chosen.items() if axis != "family")
        raise ConfigError(
            f"attention '{written}': '{chosen['family'].name}' never forms attention weights, so it is not combined; "
            f"drop {others}"
        )
    if "family" in chosen:
        return chosen
    defaults = DEFAULTS | ({"grouping": "gqa"} if shares_heads else {})
    chosen = {axis: find(name) for axis, name in defaults.items()} | chosen
    return {axis: chosen[axis] for axis in AXES if axis in chosen}


def _find_option(written: str, given: str, chosen: Iterable[type[Component]]) -> tuple[str, Option]:
    """Return the option that "alpha" or "entmax.alpha" means, and its one name: "alpha" if no other part has one."""
    owner, _, key = given.rpartition(".")
    owners = {component.name: o for component in chosen for o in component.options if o.name == key}
    found = {name: option for name, option in owners.items() if owner in ("", name)}
    if not found:
        raise ConfigError(f"attention '{written}' has no option '{given}'; {_nearest(key, chosen)}")
    if len(found) > 1:
        ways = " or ".join(f"'{name}.{key}'" for name in found)
        raise ConfigError(f"attention '{written}': option '{key}' belongs to {len(found)} parts; write {ways}")
    [(name, option)] = found.items()
    return key if len(owners) == 1 else f"{name}.{key}", option


def _nearest(key: str, chosen: Iterable[type[Component]]) -> str:
    """Return which options `chosen` has, and which mechanism has an option that is spelled like `key`."""
    own = {o.name for component in chosen for o in component.options}
    others = {o.name for component in mechanisms().values() for o in component.options} - own
    near = difflib.get_close_matches(key, sorted(others), n=1, cutoff=0.7)
    owners = sorted(c.name for c in mechanisms().values() if any(o.name in near for o in c.options))
    return one_of(key, own) + (f"; '{near[0]}' belongs to {', '.join(owners)}" if near else "")
