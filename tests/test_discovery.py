"""Discovery: the record of a plugin in every state, and the error for asking for it by name."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import entrypoints
import pytest
from distributions import ADAPTER, COSINE, write_distribution
from packaging.requirements import Requirement

import quest_core
from quest_core import PluginError, catalogue, cli
from quest_core.hosts import discovery, loading
from quest_core.hosts.discovery import discover
from quest_core.mechanisms.part import Part

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(name, ...) writes a plugin's package and metadata as pip would, into a folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(
        name: str,
        *,
        distribution: str | None = None,
        info: str | None = None,
        init: str = "raise RuntimeError('listing plugins must not run this')",
        adapter: str | None = None,
        requires: tuple[str, ...] = (),
        entry_points: dict[str, dict[str, str]] | None = None,
    ) -> None:
        distribution = distribution or f"quest-{name}"
        package = "plugin_" + distribution.replace("-", "_")
        if info is None:
            info = f"INFO = {{'name': '{name}', 'host': '{name}', 'module': 'json', 'api': (1, 0)}}"
        write_distribution(
            tmp_path,
            distribution,
            {
                f"{package}/__init__.py": init,
                f"{package}/info.py": info,
                f"{package}/adapter.py": ADAPTER.format(name=name) if adapter is None else adapter,
            },
            {
                "quest.adapter_info": {name: f"{package}.info:INFO"},
                "quest.adapters": {name: f"{package}.adapter:HostAdapter"},
                **(entry_points or {}),
            },
            requires,
        )
        importlib.invalidate_caches()

    yield write
    catalogue.parts.cache_clear()
    loading._loaded.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("plugin_"):
            del sys.modules[module]


def record(name: str) -> discovery.Record:
    return next(r for r in discover() if r.name == name)


def test_listing_reads_info_alone(install: Install) -> None:
    install("mini")  # its __init__ raises
    assert record("mini").status == "ok"
    assert record("mini").version == "1.2"
    with pytest.raises(PluginError, match="'mini' .* fails to import: RuntimeError"):
        loading.adapter("mini")


def test_an_ok_plugin_gives_its_adapter(install: Install) -> None:
    install("mini", init="")
    made = loading.adapter("mini")
    assert made.name == "mini"
    assert loading.adapter("mini") is made


def test_a_broken_info_is_a_record(install: Install) -> None:
    install("torn", info="INFO = 1 / 0")
    assert record("torn").status == "broken"
    assert "INFO is not a literal" in record("torn").detail
    with pytest.raises(PluginError, match="'torn' is broken: .*fix: pip install --upgrade quest-torn"):
        loading.adapter("torn")


def test_a_missing_host_is_a_record(install: Install) -> None:
    install("lost", requires=('no-such-host>=2.0,<3; extra == "host"',))
    found = record("lost")
    assert found.status == "unsupported"
    assert found.detail.endswith("supported: no-such-host>=2.0,<3")
    with pytest.raises(PluginError, match=r"lost is not installed; supported: no-such-host>=2.0,<3; fix: pip install"):
        loading.adapter("lost")


def test_an_unsupported_host_version_is_a_record(install: Install) -> None:
    have = importlib.metadata.version("torch").split("+")[0]
    install("old", requires=('torch<1.0; extra == "host"',))
    assert f"found torch {have}" in record("old").detail
    assert "supported: torch<1.0" in record("old").detail
    assert record("old").status == "unsupported"


def test_one_of_several_hosts_is_enough(install: Install) -> None:
    install(
        "two", requires=('no-such-host>=2; extra == "host"', 'torch>=2; extra == "host-fork"', 'x; extra == "test"')
    )
    assert record("two").status == "ok"
    assert record("two").host_name == "torch"


def test_a_host_outside_the_package_index_is_found_by_its_module(install: Install) -> None:
    install("far", info="INFO = {'name': 'far', 'module': 'no_such_module', 'api': (1, 0), 'install': 'git clone it'}")
    assert record("far").status == "unsupported"
    assert record("far").fix == "git clone it"


def test_a_checkout_is_a_host_beside_a_package(install: Install, tmp_path: Path) -> None:
    info = "INFO = {'name': 'p', 'host': 'P', 'module': 'no_such_host', 'checkout': 'lying_here', 'api': (1, 0)}"
    install("p", info=info, init="", requires=("no-such-host>=1; extra == 'host'",))
    assert record("p").status == "unsupported"
    (tmp_path / "lying_here.py").touch()
    importlib.invalidate_caches()
    assert record("p").status == "ok"
    assert "p" not in [adapter.name for adapter in loading.running_adapters()]
    importlib.import_module("lying_here")
    try:
        assert "p" in [adapter.name for adapter in loading.running_adapters()]
    finally:
        del sys.modules["lying_here"]


@pytest.mark.parametrize("api", [(2, 0), (1, 99), (0, 9)])
def test_another_api_version_is_a_record(install: Install, api: tuple[int, int]) -> None:
    install("future", info=f"INFO = {{'name': 'future', 'module': 'json', 'api': {api}}}")
    assert record("future").status == "incompatible"
    assert f"plugin API {api[0]}.{api[1]}, this quest-core has 1.0" in record("future").detail


def test_the_second_plugin_of_a_name_is_a_record(install: Install) -> None:
    install("twin", distribution="other-twin")
    install("twin", distribution="quest-twin")
    assert record("twin").distribution == "quest-twin"
    assert record("twin").status == "ok"
    assert record("twin (other-twin)").status == "duplicate"
    with pytest.raises(PluginError, match="'twin' is a plugin of quest-twin 1.2; fix: pip uninstall other-twin"):
        loading.adapter("twin (other-twin)")


def test_a_plugin_without_an_adapter_says_so(install: Install) -> None:
    install("bare", init="", adapter="")
    with pytest.raises(PluginError, match="fails to import: AttributeError"):
        loading.adapter("bare")


def test_the_entrypoints_package_lists_the_same_plugins(install: Install) -> None:
    install("mini")
    install("torn", info="INFO = 1 / 0")
    theirs = {entry.name for entry in entrypoints.get_group_all("quest.adapter_info")}
    assert theirs == {r.name for r in discover()}
    assert {"mini", "torn"} <= theirs


def test_installed_packages_add_mechanisms(install: Install) -> None:
    install(
        "mech",
        init="",
        adapter=COSINE.format(name="cosine10"),
        entry_points={"quest.attention": {"mech": "plugin_quest_mech.adapter:PARTS"}},
    )
    catalogue.parts.cache_clear()
    assert "cosine10" in quest_core.list_mechanisms()
    assert isinstance(catalogue.parts()["cosine10"], Part)
    import torch

    q, k, v = torch.randn(3, 1, 2, 4, 8)
    want = (10 * torch.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)).softmax(-1) @ v
    torch.testing.assert_close(quest_core.attention(q, k, v, "cosine10"), want)


@pytest.mark.parametrize(
    ("specifier", "inside", "outside"),
    [
        (">=2.0", ["2.0", "2.1rc1", "3"], ["2.0rc1", "2.0.dev1", "unknown"]),
        (">=1.0.1,<1.1", ["1.0.1", "1.0.9+cpu", "1.0.10"], ["1.0", "1.1", "1.1.0", "2"]),
        ("==1.2.2", ["1.2.2", "1.2.2.0", "1.2.2+cu121"], ["1.2.3", "1.2"]),
        ("~=2.8.1", ["2.8.1", "2.8.7"], ["2.9", "2.8.0"]),
        ("==1.2.*", ["1.2", "1.2.9"], ["1.3", "1.20"]),
        ("!=1.5,>1", ["1.6", "1.5.1"], ["1.5", "1", "1.0.0"]),
        ("", ["0.1", "99"], []),
    ],
)
def test_version_specifiers(specifier: str, inside: list[str], outside: list[str]) -> None:
    wanted = Requirement(f"host{specifier}")
    assert all(discovery._accepts(wanted, version) for version in inside)
    assert not any(discovery._accepts(wanted, version) for version in outside)


def test_doctor_names_what_is_wrong_and_how_to_mend_it(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("mini", init="")
    install("lost", requires=('no-such-host>=2.0; extra == "host"',))
    install("torn", adapter="import no_such_thing", init="")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out
    assert "mini         quest-mini 1.2: ok" in lines
    assert 'fix: pip install "quest-lost[host]"' in lines
    assert "torn         quest-torn 1.2: broken - its adapter cannot be used: ModuleNotFoundError" in lines


def test_doctor_tells_a_broken_host_from_a_broken_plugin(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's top level imports, and what the adapter imports of it does not."""
    (tmp_path / "plugin_host").mkdir()
    (tmp_path / "plugin_host" / "__init__.py").write_text("def build(): raise RuntimeError('called wrongly')")
    (tmp_path / "plugin_host" / "models.py").write_text("import plugin_host.operators")
    (tmp_path / "plugin_host" / "operators.py").write_text("raise RuntimeError('no operator nms')")
    head = "'host': 'plugin_host', 'module': 'plugin_host', 'api': (1, 0)"
    blamed = "from plugin_host.models import Model"
    install("plain", init="", adapter=blamed, info=f"INFO = {{{head}}}")
    install(
        "known", init="", adapter=blamed, info=f"INFO = {{{head}, 'remedies': {{'no operator': 'pip install ops'}}}}"
    )
    install("wrong", init="", adapter="import plugin_host; plugin_host.build()", info=f"INFO = {{{head}}}")
    install("junk", init="", adapter=blamed, info=f"INFO = {{{head}, 'remedies': 7}}")
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    begins = "1.2: broken host - quest-{} is in order, but its host plugin_host cannot be imported: "
    begins += "import plugin_host.models:"
    assert begins.format("plain") in said
    assert "fix: python -c 'import plugin_host.models' shows the whole error" in said
    assert re.search(f"{begins.format('known')} RuntimeError: no operator nms.*\n    fix: pip install ops\n", said)
    assert "quest-wrong 1.2: broken - its adapter cannot be used: RuntimeError: called wrongly" in said
    assert "quest-junk 1.2: broken - 'remedies' of its info is 7, not a mapping" in said


def test_list_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in quest_core.list_mechanisms())
    assert cli.main(["check", "quest+gqa(kv_heads=4)"]) == 0
    assert "kv_heads = 4" in capsys.readouterr().out
    assert cli.main(["check", "qest"]) == 2
    assert "did you mean 'quest'?" in capsys.readouterr().err


def test_commands_end_without_a_traceback_where_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["check", "quest"]) == 1
    monkeypatch.setattr(sys, "stdout", None)  # as Python does for `quest list >&-`
    assert cli.main(["list"]) == 0


def test_commands_of_plugins_are_forwarded(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        "shout",
        init="",
        adapter="def main(argv):\n    print(*argv)\n    return 7",
        entry_points={
            "quest.commands": {"shout": "plugin_quest_shout.adapter:main", "moan": "plugin_quest_shout.adapter:missing"}
        },
    )
    assert cli.main(["shout", "a", "--flag"]) == 7
    assert capsys.readouterr().out == "a --flag\n"
    assert cli.main(["moan"]) == 2
    assert "the command 'moan' of quest-shout 1.2 fails: AttributeError" in capsys.readouterr().err


def test_the_host_is_found_among_its_companions(install: Install) -> None:
    """Build tools sort the requirements of an extra, so the host is the one that is called like it."""
    info = "INFO = {'name': 'kept', 'host': 'PyTest', 'module': 'json', 'api': (1, 0)}"
    install("kept", info=info, requires=('a-companion>=9; extra == "host"', 'pytest>=1; extra == "host"'))
    found = record("kept")
    assert (found.status, found.host_name, found.host_version) == ("ok", "pytest", pytest.__version__)


def test_requiring_a_host_says_what_is_missing_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = discovery.Record("toy", "quest-toy", "1.0", "unsupported", "toyframe is not installed", "pip install x")
    monkeypatch.setattr(discovery, "discover", lambda: [lacking])
    discovery.require_host("another")
    with pytest.raises(PluginError, match=r"'toy' is unsupported: toyframe is not installed; fix: pip install x"):
        discovery.require_host("toy")
