"""`quest new-plugin` and `quest new-mechanism`: distributions that are rendered whole and work at once.

Every file of a template is a :class:`string.Template` whose name ends in ``.tmpl``, and the folder ``PACKAGE`` takes
the name of the Python package. The template of plugins lies in plugins/_template, and a wheel of quest-core carries it
inside the package. The template of mechanisms lies in ``mechanism_template``, one folder for each axis.
"""

from __future__ import annotations

import importlib.metadata
import keyword
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

import torch
from packaging.requirements import InvalidRequirement, Requirement

from ..catalogue import parts
from ..errors import ConfigError, PluginError, one_of
from ..hosts.discovery import API_VERSION, discover
from ..mechanisms.part import AXES
from .anatomy import Anatomy, examine

TAKEN = ("bench", "core", "torch")
"""Names that quest-core and its own distributions use."""
SUFFIX = ".tmpl"
PACKAGE = "PACKAGE"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLASS = re.compile(rf"({_MODULE.pattern}):([^\W\d]\w*)")
_QUEST_IMPORTS = re.compile(r"(?:^from quest_.*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Host:
    """The framework that a plugin is for.

    Attributes:
        distribution: its name for pip, "timm".
        requirement: the same with the versions that the plugin supports, "timm>=1.0,<2"; "" for a module that no
            installed distribution has.
        module: the module whose import says that the host is in use.
        attention: its attention class, or None.
    """

    distribution: str
    requirement: str
    module: str
    attention: Anatomy | None = None


def new_plugin(
    name: str,
    *,
    host_distribution: str | None = None,
    host_module: str | None = None,
    attention_class: str | None = None,
    out: Path = Path(),
) -> Path:
    """Write the plugin ``quest-NAME`` into a new folder of `out`; either all of it or, on any error, nothing.

    Without a host the plugin is one for the small Transformer that it brings along (``stand_in.py``), so its tests pass
    at once. With a host it knows that host's names and the stand-in's.

    Args:
        name: lower-case letters, digits and single hyphens.
        host_distribution: the host for pip, with or without versions; by default the first part of `host_module`.
            Without versions, the installed one is the oldest supported.
        host_module: the host's module; by default that of `attention_class`, or the distribution's name.
        attention_class: "module:Class" of the host's attention.
        out: an existing folder.

    Returns:
        The folder that was written.

    Raises:
        ConfigError: a name that cannot be one, or a folder that exists already or does not.
        PluginError: a plugin of that name is installed, or quest-core lacks the template.
    """
    _check_name(name)
    for record in discover():
        if record.name == name:
            raise PluginError(
                f"a plugin for '{name}' is installed: {record.distribution} {record.version}; choose another name, or "
                f"pip uninstall {record.distribution}"
            )
    values = _values(name, _host(name, host_distribution, host_module, attention_class))
    return _write(name, out, values, [(_template(), Path())])


def new_mechanism(name: str, *, axis: str = "score", out: Path = Path()) -> Path:
    """Write a mechanism of one's own into the new folder ``quest-NAME`` of `out`; all of it or, on any error, nothing.

    The distribution holds a worked example, its reference and its tests, which pass at once.

    Args:
        name: lower-case letters, digits and single hyphens; what users will write.
        axis: score, normalizer, grouping or family.
        out: an existing folder.

    Returns:
        The folder that was written.

    Raises:
        ConfigError: a name that cannot be one or is taken, an unknown axis, or a folder that exists already or does
            not.
    """
    _check_name(name)
    if name in parts():
        raise ConfigError(f"name is '{name}', which is a mechanism already; choose another")
    if axis not in AXES:
        raise ConfigError(f"axis is '{axis}'; {one_of(axis, AXES)}")
    values = {
        "name": name,
        "axis": axis,
        "distribution": f"quest-{name}",
        "package": _package(name),
        "class": "".join(word.capitalize() for word in name.split("-")),
        "function": name.replace("-", "_"),
        "spec": f"{name}(kv_heads=2)" if axis == "grouping" else name,
    }
    if keyword.iskeyword(values["class"]) or keyword.iskeyword(values["function"]):
        raise ConfigError(f"name is '{name}', which is a keyword of Python; choose another, such as 'my-{name}'")
    common, package = _MECHANISM / "common", Path("src", PACKAGE)
    licence = _template() / f"LICENSE{SUFFIX}"
    return _write(name, out, values, [(common, Path()), (_MECHANISM / axis, package), (licence, Path())])


_MECHANISM = Path(__file__).parent / "mechanism_template"


def _write(name: str, out: Path, values: dict[str, str], templates: list[tuple[Path, Path]]) -> Path:
    """Render templates, each a file or folder, into places of the new folder ``quest-NAME`` of `out`."""
    if not out.is_dir():
        raise ConfigError(f"out is '{out}', which is not a folder; make it first or choose another")
    target = out / f"quest-{name}"
    if target.exists() or target.is_symlink():
        raise ConfigError(f"'{target}' exists already and is left as it is; remove it, or choose another name or out")
    try:
        with tempfile.TemporaryDirectory(prefix=f".quest-{name}-", dir=out) as scratch:
            made = Path(scratch, target.name)
            for template, place in templates:
                _render(template, made, place, values)
            made.rename(target)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written: {error.strerror}") from error
    return target


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f" (did you mean '{near}'?)" if _NAME.fullmatch(near) else ""
        raise ConfigError(
            f"name is {name!r}; it is lower-case letters, digits and single hyphens, starting with a letter, such as "
            f"'timm' or 'my-lab'{hint}"
        )
    if name.startswith("quest-"):
        raise ConfigError(f"name is '{name}', but 'quest-' is put before it; write '{name.removeprefix('quest-')}'")
    if name in TAKEN:
        raise ConfigError(f"name is '{name}', which quest-core uses itself (as it does {', '.join(TAKEN)})")


def _host(name: str, distribution: str | None, module: str | None, attention: str | None) -> Host:
    for key, value, pattern, wanted in (
        ("host-module", module, _MODULE, "a module: 'timm'"),
        ("attention-class", attention, _CLASS, "module:Class: 'timm.layers.attention:Attention'"),
    ):
        if value is not None and not pattern.fullmatch(value):
            raise ConfigError(f"{key} is {value!r}; write {wanted}")
    if module is None and attention is not None:
        module = attention.partition(":")[0].partition(".")[0]
    if distribution is None and module is None:
        return Host("torch", "torch>=2.1", f"{_package(name)}.stand_in")
    text = distribution or str(module).partition(".")[0]
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.marker or requirement.extras or requirement.url:
        raise ConfigError(
            f"host-distribution is {text!r}; write a distribution, with or without versions: 'timm>=1.0,<2'"
        )
    version = None if requirement.specifier else _version(requirement.name)
    seen = None if attention is None else examine(attention, requirement.name)
    own = seen is not None and distribution is None and version is None  # a package of that name is another one
    return Host(
        requirement.name,
        "" if own else f"{requirement.name}>={version}" if version else text,
        module or re.sub(r"\W", "_", requirement.name).lower(),
        seen,
    )


def _values(name: str, host: Host) -> dict[str, str]:
    """Return the values of the template's placeholders."""
    pins = {"torch": _release(torch.__version__)}
    version = _version(host.distribution)
    if version and host.distribution != "torch":
        pins[host.distribution] = version
    package, adapter = _package(name), "".join(word.capitalize() for word in name.split("-")) + "Adapter"
    seen = host.attention
    projections, layers, replacement = {"Packed"}, ["Injected", "InjectedStandIn"], ["HostAttention"]
    if seen is not None:
        projections |= {word for word in ("Packed", "Separate") if word in seen.code()}
        layers += [seen.replacement]
        replacement += ["refuse_arguments"] if seen.unread else []
    return {
        "name": name,
        "distribution": f"quest-{name}",
        "package": package,
        "adapter": adapter,
        "host": host.distribution,
        "host_requirement": f'"{host.requirement}"' if host.requirement else "",
        "host_module": host.module,
        "attention_entry": "" if seen is None else f'\n    ("{seen.module}", "{seen.name}"): {seen.replacement},',
        "host_layer": "" if seen is None else seen.code(),
        "host_test": "" if seen is None else seen.test(package, adapter),
        "host_import": f"from {seen.module} import {seen.name}\n" if seen is not None and seen.built else "",
        "seen": "" if seen is None else f"`quest new-plugin` read {seen.module}.{seen}.\n\n",
        "layer_names": ", ".join([*sorted(layers), "dropout_of", "unused"]),
        "projection_names": ", ".join(sorted(projections)),
        "replacement_names": ", ".join(replacement),
        "pins": "\n".join(f"{distribution}=={version}" for distribution, version in pins.items()),
        "api": str(API_VERSION),
    }


def _render(template: Path, target: Path, place: Path, values: dict[str, str]) -> None:
    sources = [template] if template.is_file() else sorted(template.rglob(f"*{SUFFIX}"))
    for source in sources:
        inside = Path(source.name) if source == template else source.relative_to(template)
        names = [values["package"] if part == PACKAGE else part for part in (place / inside).parts]
        path = target.joinpath(*names).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        path.write_text(_QUEST_IMPORTS.sub(_sort_lines, text) if path.suffix == ".py" else text, encoding="utf-8")


def _sort_lines(match: re.Match[str]) -> str:
    """Sort imports: the place of the plugin's own among those of quest_core depends on its name."""
    return "".join(sorted(match[0].splitlines(keepends=True), key=lambda line: line.split()[1]))


def _template() -> Path:
    installed = Path(__file__).parents[1] / "_template"
    checkout = Path(__file__).parents[2] / "plugins" / "_template"
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise PluginError("this quest-core lacks the template of plugins; fix: pip install --force-reinstall quest-core")


def _package(name: str) -> str:
    return f"quest_{name.replace('-', '_')}"


def _version(distribution: str) -> str | None:
    try:
        return _release(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """Return a version without its local tag, which no package index knows: "2.13.0+cpu" -> "2.13.0"."""
    return version.partition("+")[0]
