"""Installed plugins: the adapters that other distributions declare under the entry-point group ``quest.adapters``.

The name of an entry point is the module of the host, so no plugin is imported before its host is::

    [project.entry-points."quest.adapters"]
    timm = "quest_timm.adapter:TimmAdapter"

A plugin whose host has two modules declares one entry point per module, both with the same class. The extra ``host`` of
the distribution (or several extras, ``host-...``) lists the supported versions of the host.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..errors import PluginError, one_of
from ..notices import say
from .adapter import Adapter
from .torch import TorchAdapter

GROUP = "quest.adapters"


@dataclass(frozen=True)
class Plugin:
    """One installed distribution with an adapter."""

    name: str  # the distribution without "quest-": "graphgps"
    distribution: str  # "quest-graphgps"
    version: str
    modules: tuple[str, ...]  # the modules of the host, any of which is enough: ("torch_geometric",)
    value: str  # where the adapter is: "quest_graphgps.adapter:GraphGPSAdapter"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def fix(self) -> str:
        """The command that installs the host in a supported version."""
        return f"pip install '{self.distribution}[host]'"

    @property
    def running(self) -> bool:
        """Whether this process has imported the host."""
        return any(module in sys.modules for module in self.modules)

    def hosts(self) -> Iterator[tuple[Requirement, str]]:
        """Yield the requirements of the extras `host` and `host-...` that name the host, with the installed version.

        A distribution is the host if its name contains the name of the module: torch-geometric, ve-fairseq. The other
        requirements of the extra are companions of the host.
        """
        about = metadata.distribution(self.distribution)
        extras = [name for name in about.metadata.get_all("Provides-Extra") or () if name.partition("-")[0] == "host"]
        for requirement in map(Requirement, about.requires or ()):
            marker, name = requirement.marker, canonicalize_name(requirement.name)
            named = any(canonicalize_name(module) in name for module in self.modules)
            if named and marker and any(marker.evaluate({"extra": extra}) for extra in extras):
                yield requirement, _version(name)

    def host(self) -> str:
        """Return the installed distribution of the host with its version, or an empty text, as for a checkout."""
        return next((f"{requirement.name} {version}" for requirement, version in self.hosts() if version), "")

    def problem(self) -> str:
        """Return why the host cannot be used: it is missing or of another version. Empty if it can."""
        if not any(is_importable(module) for module in self.modules):
            return f"{' or '.join(self.modules)} is not installed"
        hosts = list(self.hosts())
        fits = [requirement.specifier.contains(version, prereleases=True) for requirement, version in hosts if version]
        if any(fits) or not fits:
            return ""
        supported = " or ".join(f"{requirement.name}{requirement.specifier}" for requirement, _ in hosts)
        return f"found {self.host()}, supported is {supported}"

    @functools.cache  # noqa: B019 - plugins live as long as the process
    def load(self) -> Adapter | PluginError:
        """Import the adapter, once. Returns the error, if importing it or creating it raises an Exception."""
        try:
            made = metadata.EntryPoint(self.modules[0], self.value, GROUP).load()()
            if not isinstance(made, Adapter):
                raise TypeError(f"{self.value} is not a subclass of quest_core.Adapter")
            return made
        except Exception as error:
            host = self.problem()
            problem = PluginError(
                f"plugin {self} cannot be loaded: {type(error).__name__}: {error}"
                + (f"; {host}; fix: {self.fix}" if host else "; `quest doctor` explains it")
            )
            problem.__cause__ = error
            return problem


def plugins() -> list[Plugin]:
    """Return the installed plugins, sorted by name. Imports none of them."""
    modules: dict[tuple[str, str, str], list[str]] = {}
    for point in metadata.entry_points(group=GROUP):
        assert point.dist is not None  # set for every entry point of an installed distribution
        modules.setdefault((point.dist.name, point.dist.version, point.value), []).append(point.name)
    return sorted(
        (
            Plugin(canonicalize_name(name).removeprefix("quest-"), name, version, tuple(sorted(found)), value)
            for (name, version, value), found in modules.items()
        ),
        key=lambda plugin: plugin.name,
    )


def find(name: str) -> Plugin:
    """Return the plugin of this name, or of this module of a host; raise PluginError if there is none."""
    installed = plugins()
    for plugin in sorted(installed, key=lambda plugin: plugin.name != name):  # the name first
        if name == plugin.name or name in plugin.modules:
            return plugin
    known = one_of(name, [plugin.name for plugin in installed])
    raise PluginError(f"no plugin for '{name}' is installed; {known}; fix: pip install 'quest-{name}[host]'")


def adapter(name: str) -> Adapter:
    """Return the adapter of an installed plugin, or of plain PyTorch, "torch"; PluginError if it cannot be loaded."""
    made = TorchAdapter() if name == TorchAdapter.name else find(name).load()
    if isinstance(made, PluginError):
        raise made
    return made


def running_adapters() -> list[Adapter]:
    """Return the adapters whose host this process has imported. A plugin that cannot be loaded is logged, once."""
    loaded = [plugin.load() for plugin in plugins() if plugin.running]
    for problem in loaded:
        if isinstance(problem, PluginError):
            _say_once(str(problem))
    return [made for made in loaded if isinstance(made, Adapter)]


_say_once = functools.cache(say)


def is_importable(module: str) -> bool:
    """Return whether the package of a module is installed. Imports nothing."""
    top = module.partition(".")[0]  # finding a submodule would import its package
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
