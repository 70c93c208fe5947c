"""AttentionConfig: one grammar for attention in Python, yaml, JSON and on command lines.

All of these mean the same::

    "quest+gqa(kv_heads=4)"
    {"name": "quest+gqa", "kv_heads": 4}
    {"name": "quest", "kv_heads": 4}              # kv_heads without a grouping means gqa
    '{"name": "quest", "kv_heads": 4}'            # JSON, as a command line hands it over

A name is one or more parts joined by ``+``, at most one for each axis (score, normalizer, grouping); what is
left out is standard, softmax, mha. Families (linear, aft-simple, ...) are not combined.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from .catalogue import parts
from .errors import ConfigError, one_of
from .mechanisms.part import Part

DEFAULTS = {"score": "standard", "normalizer": "softmax", "grouping": "mha"}


@dataclass(frozen=True)
class AttentionConfig:
    """A validated choice of attention. Build it with :meth:`parse`; equal configurations compare and hash equal.

    Attributes:
        parts: axis -> name, for all three axes, or ``{"family": name}``.
        options: the options that were given, checked and converted; defaults are not filled in.
    """

    parts: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...] = field(default=())

    @classmethod
    def parse(cls, spec: AttentionSpec) -> AttentionConfig:
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
            return _validate(*_read_text(spec.strip()))
        if isinstance(spec, Mapping):
            if not isinstance(spec.get("name"), str):
                raise ConfigError(
                    f"attention {dict(spec)!r} has no 'name'; write for example {{'name': 'quest', 'kv_heads': 4}}"
                )
            names, options = _read_text(spec["name"].strip())
            given = {str(key): value for key, value in spec.items() if key != "name"}
            for key in options.keys() & given.keys():
                raise ConfigError(f"attention: option '{key}' is given twice, in the name and as a key")
            return _validate(names, options | given)
        raise ConfigError(
            f"attention is {spec!r} ({type(spec).__name__}); write a name such as 'quest', "
            "a mapping such as {'name': 'quest', 'kv_heads': 4}, or 'quest+gqa(kv_heads=4)'"
        )

    @property
    def family(self) -> str | None:
        """The family's name, or None for a combination of score, normalizer and grouping."""
        return dict(self.parts).get("family")

    @property
    def name(self) -> str:
        """The shortest name that means this choice of parts: 'quest', 'quest+gqa', 'standard'."""
        if self.family:
            return self.family
        chosen = [name for axis, name in self.parts if DEFAULTS[axis] != name]
        return "+".join(chosen) or DEFAULTS["score"]

    def __getitem__(self, axis: str) -> str:
        return dict(self.parts)[axis]

    def specs(self) -> Iterator[Part]:
        """Return the declared parts, axis by axis."""
        return (parts()[name] for _, name in self.parts)

    def option(self, key: str) -> Any:
        """Return the value of an option: the one given or the part's default; None if no part has the option."""
        given = dict(self.options)
        if key in given:
            return given[key]
        return next((o.default for p in self.specs() for o in p.options if o.name == key), None)

    @property
    def is_standard(self) -> bool:
        """Whether it is the attention of every host; adapters then keep its exact rounding and its checkpoints."""
        return self.means(STANDARD)

    def means(self, spec: AttentionSpec) -> bool:
        """Return whether `spec` is this attention; False if it is unknown here.

        An omitted option equals its default. Options that only initialize a fresh model are not compared.
        """
        try:
            other = AttentionConfig.parse(spec)
        except ConfigError:
            return False
        compared = [o.name for part in self.specs() for o in part.options if o.starts is None]
        return self.parts == other.parts and all(self.option(name) == other.option(name) for name in compared)

    @property
    def initial_norms(self) -> dict[str, float]:
        """Norms of queries ("q") and keys ("k") in a fresh model, if options set them; see `projections.init_norms`."""
        named = {o.starts: self.option(o.name) for part in self.specs() for o in part.options if o.starts in ("q", "k")}
        return {role: norm for role, norm in named.items() if role is not None and norm is not None}

    def without_initial_norms(self) -> AttentionConfig:
        """Return the same attention without the options that only set initial norms."""
        names = {o.name for part in self.specs() for o in part.options if o.starts in ("q", "k")}
        return replace(self, options=tuple((key, value) for key, value in self.options if key not in names))

    def build_arguments(self, part: Part) -> dict[str, Any]:
        """Return the options that `part` is built with, with defaults filled in."""
        given = dict(self.options)  # parts of different packages may have an option of one name, each its default
        return {o.name: given.get(o.name, o.default) for o in part.options if o.starts not in ("q", "k")}

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


def _read_text(text: str) -> tuple[list[str], dict[str, Any]]:
    """Return names and options: 'quest+gqa(kv_heads=4)' -> (['quest', 'gqa'], {'kv_heads': 4})."""
    if not re.fullmatch(rf"{_TERM}(\+{_TERM})*", text):
        raise ConfigError(
            f"attention {text!r} cannot be read; write a name, name(key=value, ...) or names joined by '+', such as "
            "'quest+gqa(kv_heads=4)'"
        )
    names: list[str] = []
    options: dict[str, Any] = {}
    for name, inside in re.findall(_TERM, text):
        names.append(name)
        for item in filter(None, map(str.strip, inside.split(","))):
            key, _, value = (piece.strip() for piece in item.partition("="))
            if not value:
                raise ConfigError(f"attention {text!r}: {item!r} is not key=value")
            if key in options:
                raise ConfigError(f"attention {text!r}: option '{key}' is given twice")
            options[key] = _read_value(value)
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


def _validate(names: list[str], options: dict[str, Any]) -> AttentionConfig:
    known = parts()
    written = "+".join(names)
    chosen: dict[str, str] = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"attention: {known.unknown(name)}")
        axis = known[name].axis
        if axis in chosen:
            raise ConfigError(
                f"attention '{written}' names two choices for the {axis}: '{chosen[axis]}' and '{name}'; keep one"
            )
        chosen[axis] = name
    if "family" in chosen:
        if len(chosen) > 1:
            others = ", ".join(f"'{n}'" for a, n in chosen.items() if a != "family")
            raise ConfigError(
                f"attention '{written}': '{chosen['family']}' never forms attention weights, so it is not combined; "
                f"drop {others}"
            )
    else:
        if "grouping" not in chosen and "kv_heads" in options:
            chosen["grouping"] = "gqa"
        chosen = DEFAULTS | chosen

    specs = {o.name: o for axis in chosen for o in known[chosen[axis]].options}
    checked: dict[str, Any] = {}
    for key, value in options.items():
        if key not in specs:
            elsewhere = sorted({o.name for p in known.values() for o in p.options} - set(specs))
            hint = ""
            for near in difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.7):
                holders = sorted(p.name for p in known.values() if any(o.name == near for o in p.options))
                hint = f"; '{near}' belongs to {', '.join(holders)}"
            raise ConfigError(f"attention '{written}' has no option '{key}'; {one_of(key, specs)}{hint}")
        holders = [f"'{name}'" for name in chosen.values() if any(o.name == key for o in known[name].options)]
        if len(holders) > 1:
            raise ConfigError(
                f"attention '{written}': option '{key}' belongs to {' and '.join(holders)}; rename it in one Part"
            )
        checked[key] = specs[key].check(value, written)
    return AttentionConfig(tuple(chosen.items()), tuple(sorted(checked.items())))
