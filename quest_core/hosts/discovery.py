"""Installed plugins as records.

Discovery reads entry points, the metadata of distributions and the text of each plugin's ``info.py``. It runs no code
of a plugin and imports no framework. A plugin that cannot be used yields a record that says why; asking for it by name
raises PluginError.

Entry-point groups: ``quest.attention`` (a list of Part), ``quest.adapters`` (an Adapter class),
``quest.adapter_info`` (the INFO mapping), ``quest.benchmarks`` (a run function), ``quest.commands`` (a main
function).
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from ..errors import PluginError, one_of
from ..packages import Entry, cause, contained, entries

API_VERSION = (1, 0)
"""The adapter contract's version. A plugin fits when its major is the same and its minor is not larger."""


@dataclass(frozen=True)
class Record:
    """One discovered plugin."""

    name: str  # how it is asked for, e.g. "tsai". A duplicate is called "tsai (its distribution)".
    distribution: str
    version: str
    # "ok", "broken", "unsupported" (the host is missing or of another version), "incompatible" (another API version) or
    # "duplicate" (another distribution has the name)
    status: str
    detail: str = ""  # what was found, in words; empty when ok
    fix: str = ""  # the command that fixes it; empty when ok
    info: Mapping[str, Any] = field(default_factory=dict)  # the plugin's INFO mapping
    host_version: str | None = None  # its version, if it is installed
    host_name: str = ""  # the distribution that is the host here; of several, the first that fits
    kind: str = "plugin"  # "plugin"; `quest doctor` also makes records of "mechanisms" and "command"

    def require(self) -> None:
        """Raise PluginError, with the command that fixes it, unless the plugin can be used."""
        if self.status != "ok":
            raise PluginError(f"plugin '{self.name}' is {self.status}: {self.detail}; fix: {self.fix}")


def discover() -> list[Record]:
    """Return a record of every installed plugin, sorted by name. Runs no code of a plugin and never raises."""
    first: dict[str, Entry] = {}
    found = []
    for entry in entries("quest.adapter_info"):
        owner = first.setdefault(entry.name, entry)
        if owner is entry:
            found.append(_examine(entry))
        elif owner.distribution != entry.distribution:
            found.append(duplicate(entry, owner.owner, "plugin"))
    return found


def duplicate(entry: Entry, owner: str, kind: str) -> Record:
    """Return the record of an entry point whose name another distribution has."""
    name, detail = f"{entry.name} ({entry.distribution})", f"'{entry.name}' is a {kind} of {owner}"
    fix = f"pip uninstall {entry.distribution}"
    return Record(name, entry.distribution, entry.version, "duplicate", detail, fix, kind=kind)


def _examine(entry: Entry) -> Record:
    record = functools.partial(Record, entry.name, entry.distribution, entry.version)
    if entry.problem:
        return record("broken", entry.problem, entry.fix)
    try:
        info = check_info(entry.name, read_info(entry.value))
        host = str(info["host"])
        wanted = host_requirements(entry, host)
        module = "module" not in info or _is_importable(info["module"])
        checkout = "checkout" in info and _is_importable(info["checkout"])
    except Exception as error:
        return record("broken", f"its info {entry.value} cannot be read: {cause(error)}", entry.fix)
    api = info["api"]
    if api[0] != API_VERSION[0] or api[1] > API_VERSION[1]:
        theirs, ours = (".".join(map(str, version)) for version in (api, API_VERSION))
        found = f"it was written for plugin API {theirs}, this quest-core has {ours}"
        return record("incompatible", found, f"pip install --upgrade quest-core {entry.distribution}", info)
    installed = [(r, v) for r in wanted if (v := _installed(r.name)) is not None]
    host_name, host_version = next(((r.name, v) for r, v in installed if _accepts(r, v)), ("", None))
    if host_version or checkout or (not wanted and module):
        return record("ok", "", "", info, host_version, host_name)
    if not wanted:
        found = f"{host} cannot be imported (no module '{info['module']}')"
        fix = f"put {info['module']} on PYTHONPATH"
    else:
        versions = " and ".join(f"{r.name} {v}" for r, v in installed)
        supported = " or ".join(r.name + ",".join(sorted(map(str, r.specifier), reverse=True)) for r in wanted)
        found = (f"found {versions}" if installed else f"{host} is not installed") + f"; supported: {supported}"
        fix = f'pip install "{entry.distribution}[host]"'
        host_version = installed[0][1] if installed else None
    return record("unsupported", found, str(info.get("install", fix)), info, host_version)


def read_info(value: str) -> Mapping[str, Any]:
    """Return the INFO of ``"package.info:INFO"`` without running the file: INFO must be written as a literal.

    Raises:
        OSError, SyntaxError, TypeError, ValueError: the file does not exist or has no such literal.
    """
    path, attribute = _source(value)
    found = None
    for node in ast.parse(path.read_bytes(), str(path)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found = node.value if isinstance(target, ast.Name) and target.id == attribute else found
    if found is None:
        raise ValueError(f"{path} does not assign {attribute}")
    try:
        info = ast.literal_eval(found)
    except ValueError as error:
        where = str(error).partition(":")[0]  # "malformed node or string on line 9", then an address
        raise ValueError(
            f"{attribute} is not a literal ({where}), and it is not run; write texts, numbers, lists and mappings"
        ) from None
    if not isinstance(info, dict):
        raise TypeError(f"{attribute} is {info!r:.60}, not a mapping")
    return info


def check_info(name: str, info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the INFO of plugin `name` with defaults for what it leaves out; raise ValueError naming a wrong key."""
    info = {"name": name, "host": name, **info}
    if info["name"] != name:
        raise ValueError(f"'name' is {info['name']!r}, but the entry point is called {name!r}")
    if not isinstance(info["host"], str):
        raise ValueError(f"'host' is {info['host']!r}; it must be a text")
    api = info.get("api")
    if not (isinstance(api, tuple | list) and len(api) == 2 and all(type(n) is int for n in api)):
        raise ValueError(f"'api' is {api!r}; it must be two whole numbers such as {API_VERSION}")
    for key in info.keys() & {"module", "checkout"}:
        if not all(map(str.isidentifier, str(info[key]).split("."))):
            raise ValueError(f"{key!r} is {info[key]!r}; it must be a module's name")
    return info


def load_info(value: str) -> Mapping[str, Any]:
    """Return the mapping ``"package.module:ATTRIBUTE"`` from a module that is run without its package.

    Raises:
        PluginError: the file does not exist or raises anything.
    """
    with contained(value):
        path, attribute = _source(value)
        found = runpy.run_path(str(path))[attribute]
        if not isinstance(found, Mapping):
            raise TypeError(f"{value} is {type(found).__name__}, not a mapping")
        return found


def _source(value: str) -> tuple[Path, str]:
    """Return the file and the attribute of ``"package.module:ATTRIBUTE"``; imports nothing."""
    module, _, attribute = value.partition(":")
    package, _, leaf = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no package '{package}'")
    for folder in spec.submodule_search_locations or []:
        path = Path(folder, *leaf.split(".")).with_suffix(".py")
        if path.is_file():
            return path, attribute
    raise FileNotFoundError(f"no file for '{module}' in package '{package}'")


def _is_importable(module: str) -> bool:
    top = module.partition(".")[0]  # to look for a dotted name would import its package
    return top in sys.modules or importlib.util.find_spec(top) is not None


def find(name: str) -> Record:
    """Return the record of an installed plugin, of any status; raise PluginError if there is none."""
    records = {record.name: record for record in discover()}
    if name not in records:
        hosts = [other for other, record in records.items() if record.status != "ok" or "module" in record.info]
        raise PluginError(f"no plugin for '{name}' is installed; {one_of(name, hosts)}; pip install quest-{name}")
    return records[name]


def require_host(name: str) -> None:
    """Raise PluginError if the host of plugin `name` is missing or of a version that the plugin does not support.

    `Adapter.install` calls it first, so that our error is raised before the host's.
    """
    for record in discover():
        if record.name == name and record.status == "unsupported":
            record.require()


def host_requirements(entry: Entry, host: str) -> list[Requirement]:
    """Return the hosts that a plugin supports, one for each of its extras named `host` or `host-...`.

    In an extra with several requirements, the host is the one whose name contains `host` or is contained in it, spaces
    and case aside: "PyTorch Geometric" is torch-geometric, "fairseq" is ve-fairseq. The others are companions.

    Raises:
        ValueError: no requirement, or more than one, is called like the host; or one cannot be read.
    """
    chosen, called = [], canonicalize_name(host.replace(" ", "-"))
    try:
        marked = [(r, r.marker) for r in map(Requirement, entry.requires)]
    except InvalidRequirement as error:
        raise ValueError(f"a requirement of {entry.owner} cannot be read: {error}") from None
    for extra in entry.extras:
        if extra == "host" or extra.startswith("host-"):
            given, none = {"extra": extra}, {"extra": ""}
            candidates = [r for r, marker in marked if marker and marker.evaluate(given) and not marker.evaluate(none)]
            named = candidates
            if len(candidates) > 1:
                named = [r for r in candidates if (name := canonicalize_name(r.name)) in called or called in name]
            if candidates and len({r.name for r in named}) != 1:
                raise ValueError(
                    f"the extra '{extra}' requires {', '.join(r.name for r in candidates)}; write as 'host' which of "
                    f"them is the framework, instead of {host!r}"
                )
            chosen += named[:1]
    return chosen


def _accepts(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
