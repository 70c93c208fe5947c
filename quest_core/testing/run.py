"""`quest check --plugin`: the conformance suites of a plugin, run by pytest."""

from __future__ import annotations

import importlib.metadata
import json
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from ..errors import PluginError
from ..hosts.plugins import find
from .conformance import AdapterConformance


def check_plugin(name: str) -> int:
    """Run the tests of every AdapterConformance class among the tests of a plugin.

    Args:
        name: an installed plugin, or a folder of tests.

    Returns:
        0 if all pass, else the exit status of pytest.

    Raises:
        PluginError: `name` is neither, or the plugin is installed without its tests.
    """
    folder = Path(name) if Path(name).exists() else _tests(find(name).distribution)
    plugins = ["-p", "quest_core.testing", "-p", "quest_core.testing.pytest_plugin", "-p", "no:cacheprovider"]
    return int(pytest.main([str(folder.resolve()), *plugins, "-q"], plugins=[_Conformance()]))


class _Conformance:
    """A pytest plugin that runs conformance tests only."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if issubclass(getattr(item, "cls", None) or object, AdapterConformance)]


def _tests(distribution: str) -> Path:
    """Return the folder of the tests of a plugin that is installed from a checkout of its source."""
    text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
    url = urllib.parse.urlparse(json.loads(text)["url"] if text else "")
    folder = Path(urllib.request.url2pathname(url.path), "tests")
    if url.scheme != "file" or not folder.is_dir():
        raise PluginError(
            f"{distribution} is installed without its tests; fix: quest check --plugin FOLDER, with the folder of its "
            "tests in a checkout of its source"
        )
    return folder
