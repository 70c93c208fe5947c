"""Installed plugins: found without an import, loaded with their host, and explained if they cannot be used."""

import contextlib
import importlib.metadata
import os
import re
import sys

import pytest
from distributions import ADAPTER, write_distribution
from torch import nn

import quest_core
from quest_core import PluginError, cli
from quest_core.cli import doctor
from quest_core.hosts import plugins


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, ...) writes a plugin's package and metadata as pip would, into a folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of child processes
    before = set(sys.modules)

    def write(name, *modules, adapter=None, requires=(), entry_points=None):
        package = f"plugin_{name}"
        source = ADAPTER.format(name=name) if adapter is None else adapter
        adapters = dict.fromkeys(modules or ["json"], f"{package}.adapter:HostAdapter")
        write_distribution(
            tmp_path,
            f"quest-{name}",
            {f"{package}/__init__.py": "", f"{package}/adapter.py": source},
            {"quest.adapters": adapters, **(entry_points or {})},
            requires,
        )

    yield write
    plugins.Plugin.load.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("plugin_"):
            del sys.modules[module]


def test_finding_a_plugin_imports_nothing(install):
    install("mini", adapter="raise RuntimeError")
    found = plugins.find("mini")
    assert (found.name, found.version, found.modules) == ("mini", "1.2", ("json",))
    assert "plugin_mini" not in sys.modules


def test_a_plugin_runs_once_its_host_is_imported(install, monkeypatch):
    install("mini", "its_index_name", "its_checkout")
    assert [made.name for made in plugins.running_adapters()] == []
    monkeypatch.setitem(sys.modules, "its_checkout", sys)
    assert [made.name for made in plugins.running_adapters()] == ["mini"]
    assert plugins.running_adapters() == [plugins.adapter("mini")]
    assert plugins.find("its_index_name") == plugins.find("mini")


@pytest.mark.parametrize("source", ["1 / 0", "import no_such_host", "HostAdapter = dict", "HostAdapter = None"])
def test_a_broken_plugin_disables_itself(install, source):
    install("torn", adapter=source)
    install("mini")
    with pytest.raises(PluginError, match="plugin quest-torn 1.2 cannot be loaded: .*Error"):
        plugins.adapter("torn")
    assert [made.name for made in plugins.running_adapters()] == ["mini"]
    with pytest.raises(quest_core.InjectionError, match="no attention.*plugin quest-torn 1.2 cannot be loaded"):
        quest_core.inject(nn.Linear(2, 2), "quest")
    quest_core.inject(nn.TransformerEncoderLayer(16, 2, dropout=0.0), "quest")


def test_a_host_that_is_missing(install):
    install("lost", "no_such_host", adapter="import no_such_host")
    assert plugins.find("lost").problem() == "no_such_host is not installed"
    with pytest.raises(PluginError, match=r"no_such_host is not installed; fix: pip install 'quest-lost\[host\]'"):
        plugins.adapter("lost")


def test_a_host_of_another_version(install):
    install("old", "torch", requires=('a-companion>=9; extra == "host"', 'torch<1.0; extra == "host"', "torch>=2"))
    installed = importlib.metadata.version("torch")
    assert plugins.find("old").problem() == f"found torch {installed}, supported is torch<1.0"


def test_one_of_several_hosts_is_enough(install):
    install("two", "torch", requires=('torch-fork>=2; extra == "host"', 'torch>=2; extra == "host-fork"'))
    assert plugins.find("two").problem() == ""
    assert plugins.find("two").host().startswith("torch 2")


def test_two_plugins_of_one_host_both_run(install):
    install("json")
    install("another")
    assert [made.name for made in plugins.running_adapters()] == ["another", "json"]
    assert plugins.find("json").distribution == "quest-json"


# --- the command line -----------------------------------------------------------------------------------------------


def test_doctor_says_what_is_wrong_and_the_fix(install, tmp_path, monkeypatch, capsys):
    (tmp_path / "torn_host.py").write_text("raise RuntimeError('no operator nms')")
    (tmp_path / "slow_host.py").write_text("import time; time.sleep(60)")
    (tmp_path / "rude_host.py").write_text("import os; os._exit(3)")
    install("mini", "json", adapter="")
    install("lost", "no_such_host")
    install("torn", adapter="import no_such_thing")
    install("host", "torn_host", adapter="import torn_host")
    install("slow", "slow_host", adapter="import slow_host")
    install("rude", "rude_host", adapter="import rude_host")
    monkeypatch.setattr(doctor, "LOAD", "__import__('plugin_' + {!r} + '.adapter')")  # without PyTorch
    assert cli.main(["doctor", "--timeout", "2"]) == 1
    said = capsys.readouterr().out
    assert "  quest-mini 1.2: ok\n" in said
    assert "  quest-lost 1.2: no_such_host is not installed\n    fix: pip install 'quest-lost[host]'\n" in said
    assert "  quest-torn 1.2: it cannot be imported: " in said
    assert "No module named 'no_such_thing'" in said
    assert "  quest-host 1.2: its host torn_host cannot be imported: RuntimeError: no operator nms\n" in said
    assert "    fix: python -c 'import torn_host' shows the whole error" in said
    assert "  quest-slow 1.2: its host slow_host cannot be imported: it takes more than 2 s\n" in said
    assert "  quest-rude 1.2: its host rude_host cannot be imported: it ends the process with status 3\n" in said


def test_doctor_is_content_with_what_works(install, capsys):
    install("mini", "torch", requires=('torch>=2; extra == "host"',))
    assert cli.main(["doctor"]) == 0
    assert f"  quest-mini 1.2 with torch {importlib.metadata.version('torch')}: ok\n" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_doctor_takes_whole_seconds(seconds, capsys):
    with contextlib.suppress(SystemExit):  # argparse's, after its own message
        cli.main(["doctor", "--timeout", seconds])
    assert re.search(rf"--timeout.* {seconds}\b|'{seconds}'", capsys.readouterr().err)


def test_quest_without_a_command_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([])
    assert "doctor" in capsys.readouterr().out


def test_list_names_mechanisms_and_check_explains_them(capsys):
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in quest_core.list_mechanisms())
    assert cli.main(["check", "quest+gqa(kv_heads=4)"]) == 0
    said = capsys.readouterr().out
    assert "kv_heads = 4" in said
    assert "narrow heads: on text, unit keys were worse" in said
    assert "results/widths/" in said
    assert cli.main(["check", "standard"]) == 0
    assert "narrow" not in capsys.readouterr().out
    assert cli.main(["check", "qest"]) == 2
    assert "did you mean 'quest'?" in capsys.readouterr().err


@pytest.mark.parametrize("option", [[], ["--mechanism"]], ids=["explain", "test"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gqa", "kv_heads"),
        ("gqa(kv_heads=2,ratio=2)", "ratio"),
        ("qknorm-hs(init=200)", "init"),
        ("aft-conv(window=4)", "window"),
        ("dgqa(kv_heads=2,alpha=2)", "alpha"),
    ],
)
def test_check_refuses_options_that_no_model_takes(text, said, option, capsys):
    assert cli.main(["check", *option, text]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["gqa(ratio=3)", "kdgqa(ratio=3)", "kdgqa(kv_heads=2,min_queries=20)"])
def test_check_takes_what_fits_some_number_of_heads(text, capsys):
    assert cli.main(["check", text]) == 0
    assert f"valid: {text}" in capsys.readouterr().out.replace(", ", ",")


def test_the_start_of_a_model_is_no_part_of_a_mechanism(capsys):
    assert cli.main(["check", "--mechanism", "quest(init=3)"]) == 0
    assert "checks, all passed" in capsys.readouterr().out


def test_commands_end_without_a_traceback_if_nothing_reads_them(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["check", "quest"]) == 1
    monkeypatch.setattr(sys, "stdout", None)  # as Python does for `quest list >&-`
    assert cli.main(["list"]) == 0


def test_commands_of_plugins_are_forwarded(install, capsys):
    install(
        "shout",
        adapter="def main(argv):\n    print(*argv)\n    return 7",
        entry_points={"quest.commands": {"shout": "plugin_shout.adapter:main"}},
    )
    assert cli.main(["shout", "a", "--flag"]) == 7
    assert capsys.readouterr().out == "a --flag\n"


@pytest.mark.parametrize("words", ["doctor --time 6", "watch --ever 3 train.py", "run --atention quest main.py"])
def test_an_unknown_option_ends_with_status_2_and_the_usage_of_its_command(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    command, option = words.split()[:2]
    assert re.match(rf"usage: quest {command} .*unrecognized arguments: {option}", capsys.readouterr().err, re.DOTALL)
