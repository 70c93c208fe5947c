"""What exists: mechanisms, adapters, benchmarks and commands, in-tree and from installed plugins.

Discovery reads entry points and each plugin's ``info.py`` (standard library only), so it imports no framework, and
it returns records, never raises: a broken plugin is a record that says so. Asking for one plugin that is not ok
always raises, saying what was found, what is supported and the command that fixes it.

Entry-point groups: ``quest.attention`` (a list of Part), ``quest.adapters`` (an Adapter class),
``quest.adapter_info`` (the INFO mapping), ``quest.benchmarks`` (a run function), ``quest.commands`` (a main
function).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PluginError, one_of

if TYPE_CHECKING:
    from .adapter import Adapter

API_VERSION = (1, 0)
"""The adapter contract's version. A plugin fits when its major is the same and its minor is not larger."""


@dataclass(frozen=True)
class Record:
    """One discovered plugin.

    Attributes:
        name: how it is asked for, e.g. "tsai".
        status: "ok", "broken", "unsupported" (the host is missing or of another version), "incompatible" (another
            API version) or "duplicate" (two distributions claim the name).
        detail: what was found, in words; empty when ok.
        fix: the command that fixes it; empty when ok.
        info: the plugin's INFO mapping.
        host_name: the distribution that is the host here; of several, the first that fits.
        host_version: its version, if it is installed.
    """

    name: str
    distribution: str
    version: str
    status: str
    detail: str = ""
    fix: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    host_version: str | None = None
    supported: str = ""
    host_name: str = ""


def discover() -> list[Record]:
    """A record of every installed plugin, sorted by name. Imports no framework and never raises."""
    entries = importlib.metadata.entry_points(group="quest.adapter_info")
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in entries:
        claims = by_name.setdefault(entry.name, [])
        if all(_distribution(entry) != _distribution(other) for other in claims):
            claims.append(entry)
    return [_examine(name, claims) for name, claims in sorted(by_name.items())]


def _examine(name: str, claims: list[importlib.metadata.EntryPoint]) -> Record:
    entry = claims[0]
    distribution = _distribution(entry)
    version = entry.dist.version if entry.dist else "?"
    if len(claims) > 1:
        owners = [_distribution(c) for c in claims]
        return Record(
            name,
            distribution,
            version,
            "duplicate",
            f"{' and '.join(owners)} both provide '{name}'",
            f"pip uninstall {owners[-1]}",
        )
    try:
        info = load_info(entry.value)
    except Exception as error:  # a plugin may fail in any way; the record carries it
        return Record(
            name,
            distribution,
            version,
            "broken",
            f"its info cannot be read: {error!r}",
            f"pip install --force-reinstall {distribution}",
        )
    api = tuple(info.get("api", (0, 0)))
    if api[0] != API_VERSION[0] or api[1] > API_VERSION[1]:
        return Record(
            name,
            distribution,
            version,
            "incompatible",
            f"it was written for plugin API {'.'.join(map(str, api))}, this quest-core has "
            f"{'.'.join(map(str, API_VERSION))}",
            f"pip install --upgrade quest-core {distribution}",
            info,
        )
    wanted = host_requirements(entry.dist, str(info.get("host", name)))
    supported = " or ".join(f"{r.name}{r.specifier}" for r in wanted)
    installed = [(r, _installed(r.name)) for r in wanted]
    fitting = [(r.name, v) for r, v in installed if v is not None and r.accepts(v)]
    present = [f"{r.name} {v}" for r, v in installed if v is not None]
    module = info.get("module")
    host_version = next((v for _, v in installed if v is not None), None)
    checkout = info.get("checkout")
    if checkout and not fitting and importlib.util.find_spec(checkout) is not None:
        return Record(name, distribution, version, "ok", "", "", info, None, supported)
    if wanted and not fitting:
        found = "found " + " and ".join(present) if present else f"{info.get('host', name)} is not installed"
        return Record(
            name,
            distribution,
            version,
            "unsupported",
            f"{found}; supported: {supported}",
            str(info.get("install", f'pip install "{distribution}[host]"')),
            info,
            host_version,
            supported,
        )
    if not wanted and module and importlib.util.find_spec(module) is None:
        return Record(
            name,
            distribution,
            version,
            "unsupported",
            f"{info.get('host', name)} cannot be imported (no module '{module}')",
            str(info.get("install", f"put {module} on PYTHONPATH")),
            info,
        )
    host_name, host_version = fitting[0] if fitting else ("", None)
    return Record(name, distribution, version, "ok", "", "", info, host_version, supported, host_name)


def load_info(value: str) -> Mapping[str, Any]:
    """The INFO of ``"package.info:INFO"``, executed alone: the package's own __init__ does not run."""
    module_name, _, attribute = value.partition(":")
    package, _, leaf = module_name.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no package '{package}'")
    for folder in spec.submodule_search_locations or []:
        path = Path(folder, *leaf.split(".")).with_suffix(".py")
        if path.is_file():
            source = importlib.util.spec_from_file_location(f"_quest_info_{package}", path)
            assert source is not None
            assert source.loader is not None
            module = importlib.util.module_from_spec(source)
            source.loader.exec_module(module)
            info = getattr(module, attribute)
            if not isinstance(info, Mapping):
                raise TypeError(f"{value} is {type(info).__name__}, not a mapping")
            return info
    raise FileNotFoundError(f"no file for '{module_name}' in package '{package}'")


def adapter(name: str) -> Adapter:
    """The adapter of an installed plugin.

    Raises:
        PluginError: when the plugin is missing or not ok, with what was found and the command that fixes it.
    """
    records = {record.name: record for record in discover()}
    if name not in records:
        raise PluginError(f"no plugin for '{name}' is installed; {one_of(name, records)}; pip install quest-{name}")
    return load_adapter(records[name])


@functools.cache
def _loaded(name: str, value: str) -> Adapter:
    entry = importlib.metadata.EntryPoint(name, value, "quest.adapters")
    made: Adapter = entry.load()()
    return made


def load_adapter(record: Record) -> Adapter:
    """The adapter of a record; raises PluginError unless the record is ok and its adapter imports."""
    if record.status != "ok":
        raise PluginError(f"plugin '{record.name}' is {record.status}: {record.detail}; fix: {record.fix}")
    for entry in importlib.metadata.entry_points(group="quest.adapters", name=record.name):
        try:
            return _loaded(entry.name, entry.value)
        except Exception as error:
            raise PluginError(
                f"plugin '{record.name}' ({record.distribution} {record.version}) fails to import: {error!r}; "
                f'fix: pip install --force-reinstall "{record.distribution}[host]"'
            ) from error
    raise PluginError(
        f"plugin '{record.name}' ({record.distribution} {record.version}) has info but no adapter under the "
        f"entry-point group quest.adapters; fix: pip install --upgrade {record.distribution}"
    )


def require_host(name: str) -> None:
    """Raise PluginError where the host of plugin `name` is missing or of a version that the plugin does not support.

    What `Adapter.install` begins with, so that nobody meets the host's own error first.
    """
    for record in discover():
        if record.name == name and record.status == "unsupported":
            raise PluginError(f"plugin '{name}' cannot be used: {record.detail}; fix: {record.fix}")


def running_adapters() -> list[Adapter]:
    """Adapters whose host is imported in this process: the ones a model at hand can belong to."""
    return [
        load_adapter(record)
        for record in discover()
        if any(str(record.info.get(key, "")) in sys.modules for key in ("module", "checkout"))
    ]


# --- versions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requirement:
    """A host that a plugin supports: a distribution and a version specifier, as its `host` extras declare."""

    name: str
    specifier: str

    def accepts(self, version: str) -> bool:
        """Whether `version` is inside the specifier (release numbers only; local and pre-release tags are cut)."""
        return all(_compare(version, clause) for clause in filter(None, self.specifier.split(",")))


def host_requirements(dist: importlib.metadata.Distribution | None, host: str) -> list[Requirement]:
    """What a plugin's extras named `host` or `host-...` require: the one place that says which versions it supports.

    Of each extra, the requirement named like the host or after it (a fork, "ve-fairseq") is the host itself; what
    stands beside it are companions. Where none is, it is the first, and build tools may have sorted them.
    """
    chosen: dict[str, Requirement] = {}
    for text in (dist.requires if dist else None) or []:
        extra = re.search(r"extra\s*==\s*['\"](host[\w-]*)['\"]", text)
        head = re.match(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", text)
        if extra and head:
            requirement = Requirement(head[1], head[2].replace(" ", ""))
            named = _normal(host) in _normal(requirement.name)
            if extra[1] not in chosen or (named and _normal(host) not in _normal(chosen[extra[1]].name)):
                chosen[extra[1]] = requirement
    return list(chosen.values())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(n) for n in match[1].split(".")) if match else ()


def _compare(version: str, clause: str) -> bool:
    match = re.match(r"(~=|==|!=|>=|<=|>|<)(.+)", clause)
    if not match:
        raise ValueError(f"cannot read the version clause {clause!r}")
    operator, wanted_text = match[1], match[2]
    wild = wanted_text.endswith(".*")
    wanted, found = _release(wanted_text), _release(version)
    width = max(len(wanted), len(found))
    padded, have = wanted + (0,) * (width - len(wanted)), found + (0,) * (width - len(found))
    if operator == "==":
        return found[: len(wanted)] == wanted if wild else have == padded
    if operator == "!=":
        return not (found[: len(wanted)] == wanted if wild else have == padded)
    if operator == "~=":
        return have >= padded and found[: len(wanted) - 1] == wanted[:-1]
    return {">=": have >= padded, "<=": have <= padded, ">": have > padded, "<": have < padded}[operator]


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return str(entry.dist.metadata["Name"]) if entry.dist else "an unknown distribution"
