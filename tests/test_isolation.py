"""A broken package disables itself and nothing else, and `quest doctor` names it."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import ADAPTER, COSINE, write_distribution

import quest_core
from quest_core import PluginError, catalogue, cli, packages
from quest_core.cli.child import Job, ask
from quest_core.cli.doctor import _unread
from quest_core.hosts import discovery, loading
from quest_core.testing.mechanisms import Outcome, brief, check_mechanism

ROOT = Path(__file__).parents[1]
NAP = "import os, time; time.sleep(float(os.environ['NAP']))"
FAULTS = {
    "raises": ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
    "exits": ("import sys; sys.exit(5)", r"it calls sys.exit\(5\)"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "cancels": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "hangs": (NAP, "it does not end within"),
    "prints": ("print('hello'); import os; os.write(1, b'')", None),
    "needs": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "no_python": ("def", "SyntaxError"),
    "ends": ("import os; os._exit(3)", "it ends the process .exit status 3"),
    "crashes": ("import os; os.kill(os.getpid(), 11)", "it ends the process .SIGSEGV"),
}
"""Fault of a module at import -> (its source, the pattern of the doctor's message or None if it is harmless)."""

LETHAL = ("ends", "crashes")
INFO = "INFO = {{'name': '{name}', 'host': '{name}', 'module': '{module}', 'api': (1, 0)}}\n"


@dataclass(frozen=True)
class Case:
    """One distribution, ``broken-<name>``.

    Attributes:
        files: module below its package -> source.
        points: group -> attribute's module and name, below its package. The entry point is called `called` or `name`.
        says: the pattern of the doctor's message; None if it works.
        lethal: it ends the process that imports it.
    """

    name: str
    files: dict[str, str]
    points: dict[str, str]
    says: str | None
    called: str = ""
    requires: tuple[str, ...] = ()
    lethal: bool = False
    latin: bool = False  # its metadata is not UTF-8
    modules: dict[str, str] = field(default_factory=dict)  # outside of its package

    @property
    def package(self) -> str:
        return f"broken_{self.name}"

    def write(self, folder: Path) -> None:
        files = {f"{self.package}/{path}.py": source for path, source in {"__init__": "", **self.files}.items()}
        called = self.called or self.name
        points = {group: {called: f"{self.package}.{value}"} for group, value in self.points.items()}
        write_distribution(folder, f"broken-{self.name}", {**files, **self.modules}, points, self.requires)
        if self.latin:
            about = folder / f"broken_{self.name}-1.2.dist-info" / "METADATA"
            about.write_bytes(about.read_bytes() + "Author: José\n".encode("latin-1"))


def plugin(name: str, says: str | None, info: str = "", adapter: str = "", **facts: Any) -> Case:
    """A plugin for a host that is always imported, json, so that `inject` imports its adapter."""
    name = f"plugin_{name}"
    files = {
        "info": info or INFO.format(name=facts.get("called", name), module="json"),
        "adapter": adapter or ADAPTER.format(name=name),
    }
    return Case(
        name, files, {"quest.adapter_info": "info:INFO", "quest.adapters": "adapter:HostAdapter"}, says, **facts
    )


def host(name: str, source: str, says: str) -> Case:
    """A plugin in order whose host has a fault."""
    name = f"host_{name}"
    info = INFO.format(name=name, module=f"hosting_{name}")
    files = {"info": info, "adapter": ADAPTER.format(name=name)}
    points = {"quest.adapter_info": "info:INFO", "quest.adapters": "adapter:HostAdapter"}
    says = rf"broken-{name} is in order, but its host .* cannot be imported: .*{says}"
    return Case(name, files, points, says, modules={f"hosting_{name}.py": source})


def mechanism(name: str, source: str, says: str | None, **facts: Any) -> Case:
    name = f"mechanism_{name}"
    return Case(
        name,
        {"parts": COSINE.format(name=f"{name}-cosine") + source},
        {"quest.attention": "parts:PARTS"},
        says,
        **facts,
    )


def command(name: str, source: str, says: str | None, **facts: Any) -> Case:
    name = f"command_{name}"
    return Case(name, {"command": source}, {"quest.commands": "command:main"}, says, **facts)


def from_info(fault: str) -> str:
    """An adapter that imports its info, as they do."""
    return f"from .info import INFO\n{ADAPTER.format(name=f'plugin_info_{fault}')}"


OPTION = "from quest_core.mechanisms import Option\nPart('o', 'score', '', '', Cosine10, options=({},))"
MAIN = "def main(arguments): return 0\n"
BUILD = "PARTS = [Part('never', 'score', '', '', lambda dims: {})]"
CASES = [
    *(
        plugin(
            f"info_{f}",
            says,
            info=INFO.format(name=f"plugin_info_{f}", module="json") + code,
            adapter=from_info(f),
            lethal=f in LETHAL,
        )
        for f, (code, says) in FAULTS.items()
        if f in ("raises", "exits", "hangs", "prints")
    ),
    plugin("info_no_python", "SyntaxError", info="INFO = {"),
    plugin("info_missing", "does not assign INFO", info="OTHER = {}"),
    plugin("info_number", "INFO is 7, not a mapping", info="INFO = 7"),
    plugin("info_computed", "INFO is not a literal", info="INFO = dict(name='x')"),
    plugin("info_file", "no file for", info="", called="x"),
    *(
        plugin(f"api_{i}", "'api' is .*two whole numbers", info=f"INFO = {{'name': 'plugin_api_{i}', 'api': {api}}}")
        for i, api in enumerate(["(1,)", "'1.0'", "None", "(1, 0, 0)", "(True, 0)", "7"])
    ),
    plugin(
        "api_newer",
        "written for plugin API 2.0",
        info="INFO = {'name': 'plugin_api_newer', 'module': 'json', 'api': (2, 0)}",
    ),
    plugin("module", "'module' is 7; it must be a module's name", info="INFO = {'module': 7, 'api': (1, 0)}"),
    plugin(
        "name",
        "'name' is 'other', but the entry point is called 'plugin_name'",
        info="INFO = {'name': 'other', 'api': (1, 0)}",
    ),
    plugin(
        "requires",
        "a requirement of broken-plugin_requires 1.2 cannot be read",
        requires=("torch >=; extra == 'host'",),
    ),
    plugin(
        "hosts",
        "write as 'host' which of them is the framework",
        requires=("a>1; extra == 'host'", "b; extra == 'host'"),
    ),
    plugin("duplicate", "'healthy' is a plugin of quest-healthy 1.2", called="healthy"),
    *(
        plugin(f"adapter_{f}", says, adapter=ADAPTER.format(name=f"plugin_adapter_{f}") + code, lethal=f in LETHAL)
        for f, (code, says) in FAULTS.items()
    ),
    plugin("adapter_number", "TypeError: 'int' object is not callable", adapter="HostAdapter = 7"),
    plugin("adapter_junk", "makes dict, not an Adapter", adapter="HostAdapter = dict"),
    plugin("adapter_missing", "AttributeError", adapter="# nothing"),
    plugin(
        "adapter_abstract",
        "TypeError: Can't instantiate",
        adapter=ADAPTER.replace("def sites", "def places").format(name="x"),
    ),
    plugin("sites_raise", "ZeroDivisionError", adapter=ADAPTER.format(name="x").replace("return []", "return 1 / 0")),
    plugin("sites_exit", r"sys.exit\(\)", adapter=ADAPTER.format(name="x").replace("return []", "raise SystemExit")),
    plugin(
        "sites_junk",
        "adapter.HostAdapter cannot look for sites in a model: TypeError: it gives 7, not Site",
        adapter=ADAPTER.format(name="x").replace("return []", "return [7]"),
    ),
    plugin("sites_none", "TypeError", adapter=ADAPTER.format(name="x").replace("return []", "return None")),
    plugin(
        "sites_later",
        "sites in a model: RuntimeError: later",
        adapter=ADAPTER.format(name="x").replace("return []", "yield from (); raise RuntimeError('later')"),
    ),
    plugin("adapter_name", "name of .* is 7, not a str", adapter=ADAPTER.format(name="x") + "    name = 7\n"),
    plugin(
        "adapter_capabilities",
        "capabilities of .* is None, not a Capabilities",
        adapter=ADAPTER.format(name="x").replace("capabilities =", "offers ="),
    ),
    plugin(
        "adapter_leaves",
        "leaves_alone of .* is 7, not a frozenset",
        adapter=ADAPTER.format(name="x") + "    leaves_alone = 7\n",
    ),
    plugin(
        "adapter_circular",
        "plugin_adapter_circular",
        adapter="from quest_core.hosts import loading\nloading.adapter('plugin_adapter_circular')\n"
        + ADAPTER.format(name="x"),
    ),
    plugin("info_host", "'host' is .'a'.; it must be a text", info="INFO = {'host': ['a'], 'api': (1, 0)}"),
    plugin("info_null", "null bytes", info="INFO = {}\0"),
    plugin("info_deep", "cannot be read", info="INFO = " + "[" * 5000 + "]" * 5000),
    Case(
        "adapter_alone", {"adapter": ADAPTER.format(name="x")}, {"quest.adapters": "adapter:HostAdapter"}, "never used"
    ),
    host("raises", "import no_such_module", "No module named 'no_such_module'"),
    host("exits", "raise SystemExit(2)", r"sys.exit\(2\)"),
    host("hangs", NAP, "it does not end within"),
    *(mechanism(f, code, says, lethal=f in LETHAL) for f, (code, says) in FAULTS.items()),
    mechanism("number", "PARTS = 7", "is an int, not a list of Part"),
    mechanism("items", "PARTS = ['a', 3]", "item 0 of .* is a str, not a Part"),
    mechanism("single", "PARTS = PARTS[0]", "is a Part, not a list of Part"),
    mechanism("axis", "PARTS = [Part('misspelt', 'scroe', '', '', Cosine10)]", "scroe.*did you mean 'score'"),
    mechanism("repeats", "PARTS = [part('again'), part('again')]", "it adds 'again' twice"),
    mechanism("in_tree", "PARTS = [part('quest')]", "'quest' is a mechanism of quest-core"),
    mechanism(
        "duplicate", "PARTS = [part('new-cosine'), part('cosine10')]", "'cosine10' is a mechanism of quest-healthy 1.2"
    ),
    mechanism("missing", "del PARTS", "AttributeError"),
    mechanism(
        "asks", "import quest_core; quest_core.list_mechanisms(); quest_core.AttentionConfig.parse('quest')", None
    ),
    mechanism("subclass", "class P(Part): pass\nPARTS = [object.__new__(P)]", "item 0 of .* is a P, not a Part"),
    mechanism("forged", "class F: __class__ = Part\nPARTS = [F()]", "item 0 of .* is a F, not a Part"),
    mechanism("reads", "Part('r', 'score', '', '', Cosine10, reads='tokens')", "reads is 'tokens'; it is a tuple of"),
    mechanism("option", OPTION.format("Option('p', float, 'x', '')"), "option 'p' is 'x', but takes a number"),
    mechanism("kind", OPTION.format("Option('p', list, [], '')"), "the kind of option 'p' is <class 'list'>"),
    mechanism("key", OPTION.format("Option('name', int, 1, '')"), "the name of an option is 'name'"),
    mechanism("alike", "PARTS = [part('Quest')]", "'Quest' is too much like 'quest': 'quest' is a mechanism of quest"),
    mechanism("mute", "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E", "^E "),
    mechanism("escapes", r"raise RuntimeError('\x1b[31mred \udcff')", r"RuntimeError: \\x1b\[31mred \\udcff"),
    mechanism("circular", "from broken_mechanism_circular.parts import later", "cannot import name 'later'"),
    mechanism("asks_itself", "import quest_core; quest_core.attention(1, 1, 1, 'later')", "'later' is not a mechanism"),
    mechanism("none", "PARTS = None", "is a NoneType, not a list of Part"),
    mechanism("generator", "PARTS = (part for part in PARTS)", "is a generator, not a list of Part"),
    mechanism("nested", "PARTS = [PARTS]", "item 0 of .* is a list, not a Part"),
    mechanism("homograph", "PARTS = [part('qu\\u0435st')]", "it is letters, digits"),
    mechanism("start", OPTION.format("Option('p', int, 1, '', starts='Q')"), "the starts of option 'p' is 'Q'"),
    mechanism("group", "raise BaseExceptionGroup('many', [KeyboardInterrupt()])", "BaseExceptionGroup|NameError"),
    mechanism("long", "raise RuntimeError('x' * 10**7)", "RuntimeError: x{300} "),
    mechanism("thread", "import threading, time; threading.Thread(target=time.sleep, args=(0.5,)).start()", None),
    mechanism("show", r"PARTS = [Part('shown', 'score', 'a \x1b[2J \udcff', '', Cosine10)]", None),
    mechanism("builds_never", BUILD.format("1 / 0"), "cannot be built for 4 heads of 16 features: ZeroDivisionError"),
    mechanism("builds_late", BUILD.format("__import__('no_such_module')"), "cannot be built .*No module named"),
    mechanism("recursion", "def f(): f()\nf()", "RecursionError"),
    Case("typo", {"parts": "PARTS = []"}, {"quest.atention": "parts:PARTS"}, "no .*; did you mean 'quest.attention'"),
    Case("latin", {"parts": "PARTS = []"}, {"quest.attention": "parts:PARTS"}, "metadata cannot be read", latin=True),
    Case("value", {}, {"quest.attention": "a b"}, "the entry point is .* must be 'module:attribute'"),
    Case("stale", {}, {"quest.attention": "gone:PARTS", "quest.commands": "gone:main"}, "ModuleNotFoundError"),
    mechanism("list", "class L(list):\n    def __iter__(self): raise SystemExit\nPARTS = L(PARTS)", "sys.exit"),
    *(command(f, MAIN + code, says, lethal=f in LETHAL) for f, (code, says) in FAULTS.items() if f != "crashes"),
    command("number", "main = 7", "it is int, not a function"),
    command("missing", "", "AttributeError"),
    command("percent", MAIN, None, called="per%cent"),
    command("list", MAIN, "'list' is a command of quest-core", called="list"),
    command("duplicate", MAIN, "'healthy' is a command of quest-healthy 1.2", called="healthy"),
]
assert len({case.name for case in CASES}) == len(CASES)


def healthy(folder: Path) -> None:
    """A distribution with a plugin, a mechanism and a command in order."""
    write_distribution(
        folder,
        "quest-healthy",
        {
            "quest_healthy/__init__.py": "",
            "quest_healthy/info.py": INFO.format(name="healthy", module="json"),
            "quest_healthy/adapter.py": ADAPTER.format(name="healthy"),
            "quest_healthy/parts.py": COSINE.format(name="cosine10"),
            "quest_healthy/command.py": "def main(arguments): return 7",
        },
        {
            "quest.adapter_info": {"healthy": "quest_healthy.info:INFO"},
            "quest.adapters": {"healthy": "quest_healthy.adapter:HostAdapter"},
            "quest.attention": {"healthy": "quest_healthy.parts:PARTS"},
            "quest.commands": {"healthy": "quest_healthy.command:main"},
        },
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NAP", "0.3")
    forget()
    yield tmp_path
    forget()
    for module in set(sys.modules) - before:
        if module.startswith(("broken_", "quest_healthy", "hosting_")):
            del sys.modules[module]


def forget() -> None:
    catalogue.parts.cache_clear()
    loading._loaded.cache_clear()
    loading._say_once.cache_clear()
    importlib.invalidate_caches()


def loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith("broken_")}


def inject_works() -> None:
    model, report = quest_core.inject(torch.nn.MultiheadAttention(8, 2), "quest")
    assert len(report.replacements) == 1
    x = torch.randn(3, 1, 8)
    model(x, x, x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_package_disables_only_itself(
    case: Case, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy(site)
    case.write(site)
    monkeypatch.setattr(packages, "SLOW_S", 0.05)

    assert quest_core.AttentionConfig.parse("quest+gqa(kv_heads=1)").name == "quest+gqa"
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    quest_core.attention(q, k, v, "quest")
    discovery.discover()
    assert loaded() == set()  # all of that runs no code of another package

    is_plugin = "quest.adapters" in case.points
    if not (case.lethal and is_plugin):  # json, its host, is imported: `inject` imports the adapter, as users want
        inject_works()
        assert is_plugin or loaded() == set()
    assert loading.adapter("healthy").name == "healthy"
    assert cli.main(["healthy"]) == 7
    if not (case.lethal and "quest.attention" in case.points):
        want = (10 * torch.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)).softmax(-1) @ v
        torch.testing.assert_close(quest_core.attention(q, k, v, "cosine10"), want)
        with pytest.raises(quest_core.ConfigError, match="did you mean 'quest'") as caught:
            quest_core.AttentionConfig.parse("qest")
        if "quest.attention" in case.points and case.says and not re.search("end within|be built", case.says):
            assert f"broken-{case.name} 1.2" in str(caught.value)  # with the cause

    said = capsys.readouterr()
    assert said.out == ""
    if "_hangs" in case.name and case.name.split("_")[0] in ("plugin", "mechanism"):
        assert f"quest: waiting for the import of {case.package}" in said.err


def test_a_broken_adapter_is_named_once_when_its_host_is_imported(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("late", None, adapter="raise RuntimeError('out of luck')").write(site)
    for _ in range(2):
        inject_works()
    (line,) = capsys.readouterr().err.splitlines()
    assert "plugin 'plugin_late' (broken-plugin_late 1.2) fails to import: RuntimeError: out of luck" in line
    assert line.endswith("; `quest doctor` names the fix")
    with pytest.raises(PluginError, match="out of luck"):
        loading.adapter("plugin_late")


@pytest.mark.timeout(500)
def test_list_and_doctor_name_every_culprit(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy(site)
    for case in CASES:
        case.write(site)
    (site / "broken_plugin_info_file" / "info.py").unlink()

    def run(*arguments: str) -> tuple[int, str]:
        out = io.StringIO()
        with redirect_stdout(out):
            return cli.main(arguments), out.getvalue()

    status, text = run("list")
    assert status == 0
    assert all(f"  {name}" in text for name in ("quest", "gqa", "sigmoid", "linear", "aft-conv"))
    assert "From quest-healthy 1.2\n  cosine10" in text
    assert "From broken-mechanism_raises 1.2: not usable: RuntimeError: out of luck" in text
    assert "hello" not in text
    assert r"shown            a \x1b[2J \udcff" in text

    monkeypatch.setenv("NAP", "600")
    status, text = run("doctor", "--json", "--timeout", "1.5")
    assert status == 1
    report = json.loads(text)
    assert report["ok"] is False
    records = {record["distribution"]: record for record in report["packages"]}
    assert [r["status"] for r in report["packages"] if r["distribution"] == "quest-healthy"] == ["ok"] * 3
    wrong = []
    for case in CASES:
        record = records[f"broken-{case.name}"]
        if case.says is None:
            wrong += [] if record["status"] == "ok" else [(case.name, record)]
        elif (
            record["status"] == "ok"
            or not re.search(case.says, record["detail"])
            or ("host_" in case.name) != (record["status"] == "broken host")
            or not record["fix"]
        ):
            wrong.append((case.name, case.says, record))
    assert wrong == [], json.dumps(wrong, indent=1)


@pytest.mark.parametrize("text", ["[quest.attention]\nname", "[quest.attention]\njosé = a:b"])
def test_unreadable_entry_points_are_named(text: str, site: Path) -> None:
    """PyTorch 2.5 and later cannot be imported then."""
    Case("unread", {}, {}, None).write(site)
    (site / "broken_unread-1.2.dist-info" / "entry_points.txt").write_bytes(text.encode("latin-1"))
    (record,) = _unread()
    assert (record.distribution, record.version, record.status) == ("broken-unread", "1.2", "broken")
    assert "its entry_points.txt cannot be read: " in record.detail
    assert "pip uninstall broken-unread" in record.fix


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}], ids=str)
def test_a_terminal_without_unicode_is_served(variables: dict[str, str]) -> None:
    code = "from quest_core import cli; cli.main(['check', 'linear'])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert b"family      linear" in done.stdout


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("lambda: None", "TypeError: .* takes 0 positional arguments but 1 was given"),
        ("lambda dims: 7", "it returns int"),
        ("lambda dims: exit(3)", r"it calls sys.exit\(3\)"),
    ],
)
def test_a_mechanism_that_cannot_be_built_is_named(build: str, said: str, site: Path) -> None:
    mechanism("built", f"PARTS = [Part('built', 'score', '', '', {build})]", None).write(site)
    said = f"'built' of broken-mechanism_built 1.2 cannot be built: {said}.* must return a quest_core.mechanisms.Score"
    with pytest.raises(PluginError, match=said):
        quest_core.attention(*torch.randn(3, 1, 2, 4, 8), "built")
    with pytest.raises(PluginError, match=said):
        quest_core.inject(torch.nn.MultiheadAttention(8, 2), "built")
    (outcome, *others) = check_mechanism("built", raises=False)
    assert re.search(said, outcome.message)
    assert [message for message in brief([outcome, *others]) if message not in ("", "as declarations")] == [
        outcome.message
    ]
    (answer,) = ask([Job("mechanisms", "mechanism_built", "broken-mechanism_built")])
    assert re.search(said, answer.problem)


def test_the_list_names_a_slow_import_while_it_waits(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mechanism("naps", NAP, None).write(site)
    monkeypatch.setattr(packages, "SLOW_S", 0.1)
    assert cli.main(["list"]) == 0
    assert "quest: waiting for the import of mechanism_naps of broken-mechanism_naps\n" in capfd.readouterr().err


HANG = """
import signal, sys
import quest_core
signal.signal(signal.SIGINT, signal.default_int_handler)
quest_core.packages.SLOW_S = 0.1
quest_core.AttentionConfig.parse("unknown")
"""


@pytest.mark.parametrize(
    "source", [NAP, f"try:\n    {NAP}\nexcept BaseException:\n    pass"], ids=["passes", "swallows"]
)
def test_ctrl_c_ends_the_program_while_a_package_hangs(source: str, site: Path) -> None:
    mechanism("waits", source, None).write(site)
    with subprocess.Popen(
        [sys.executable, "-c", HANG],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), "NAP": "600"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith("quest: waiting for the import of broken_mechanism_waits")
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.stderr.read()
            assert process.wait() == -signal.SIGINT
        finally:
            process.kill()


def test_a_command_of_a_broken_package_says_why(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if case.name == "command_exits")
    case.write(site)
    assert cli.main([case.name]) == 2
    assert (
        "the command 'command_exits' of broken-command_exits 1.2 fails: it calls sys.exit(5)" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chek"], "no command 'chek'; did you mean 'check'? Choose from: "),
        (["quest"], "no command 'quest'; "),
        (["check", "qest"], "'qest' is not a mechanism; did you mean 'quest'? Choose from: aft-conv"),
        (["check", "--mechanism", "qest"], "did you mean 'quest'?"),
        (["check", "--mechansim", "quest"], "quest check has no option '--mechansim'; did you mean '--mechanism'?"),
        (["check", "--pluginn=tsai"], "did you mean '--plugin'?"),
        (["doctor", "--js"], "no option '--js'; did you mean '--json'? Choose from: --json, --timeout"),
        (["new-mechanism", "power", "--axs", "score"], "did you mean '--axis'?"),
        (["new-mechanism", "power", "--axis", "scor"], "axis is 'scor'; did you mean 'score'?"),
        (["new-plugin", "--host-modul", "timm", "mini"], "did you mean '--host-module'?"),
        (["run", "--hots", "tsai", "train.py"], "quest run has no option '--hots'; did you mean '--host'?"),
        (["--versoin"], "quest has no option '--versoin'; did you mean '--version'?"),
    ],
)
def test_near_misses(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_command_of_a_missing_distribution_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entries", lambda group: [])
    comes = "; bench comes with quest-bench: pip install quest-bench\n"
    for command, said in (("bench", f"no command 'bench' is installed{comes}"), ("benhc", comes), ("chek", "run\n")):
        assert cli.main([command, "ls"]) == 2
        assert capsys.readouterr().err.endswith(said)


def test_a_package_cannot_keep_standard_output(site: Path) -> None:
    mechanism("steals", "import sys, io; sys.stdout = io.StringIO()", None).write(site)
    before = sys.stdout
    with redirect_stderr(io.StringIO()):
        assert "mechanism_steals-cosine" in quest_core.list_mechanisms()
    assert sys.stdout is before


def test_a_machine_without_numpy_is_no_reason_to_warn(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    done = subprocess.run(
        [sys.executable, "-c", "from quest_core import cli; cli.main(['check', 'quest'])"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("valid: quest\n")
    assert done.stderr == ""


SUITE = """
import torch
from torch import nn
from quest_core.hosts.torch import TorchAdapter
from quest_core.testing import AdapterConformance

class TestToy(AdapterConformance):
    adapter = TorchAdapter()
    sites = 1
    def make_model(self): return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    def make_inputs(self): return (torch.randn(2, 3, 8),)
    def test_luck(self): assert {luck}, "out of luck"

for name in dir(TestToy):
    if name.startswith("test_") and name not in ("test_luck", "test_standard_equals_the_host"):
        setattr(TestToy, name, None)

def test_elsewhere(): raise AssertionError("not of the suite")
"""


@pytest.mark.parametrize("luck", [True, False])
def test_check_plugin_prints_a_table(luck: bool, tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(SUITE.format(luck=luck))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra --strict-markers\n")
    done = subprocess.run(
        [sys.executable, "-c", "from quest_core import cli; print(cli.main(['check', '--plugin', '.']))"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TestToy\n  ok         2/2   standard equals the host\n" in done.stdout, done
    assert f"  {'ok         1' if luck else 'FAILED     0'}/1   luck\n" in done.stdout, done
    assert ("- TestToy.test_luck: AssertionError: out of luck" in done.stdout) is not luck
    assert "elsewhere" not in done.stdout
    assert done.stdout.endswith(f"{0 if luck else 1}\n")


def test_check_plugin_says_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path, site: Path) -> None:
    assert cli.main(["check", "--plugin", "no-such-plugin"]) == 2
    assert "no plugin for 'no-such-plugin' is installed" in capsys.readouterr().err
    healthy(site)
    assert cli.main(["check", "--plugin", "quest-healthy"]) == 2
    assert "did you mean 'healthy'?" in capsys.readouterr().err
    for settings, said in (("", "has no test class that inherits"), ("addopts = --no-such-option", "--no-such-option")):
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
        code = f"from quest_core import cli; raise SystemExit(cli.main(['check', '--plugin', {str(tmp_path)!r}]))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert said in done.stderr


def test_check_mechanism_prints_a_row_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Outcome("shapes", True, ""), Outcome("blind_rows", False, "row 3 is NaN")]
    monkeypatch.setattr("quest_core.cli.mechanisms.check_mechanism", lambda config, raises: outcomes)
    assert cli.main(["check", "--mechanism", "quest"]) == 1
    assert "  FAILED   blind rows\n           row 3 is NaN\n2 checks, 1 failed\n" in capsys.readouterr().out


def test_check_explains_what_a_text_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "linear"]) == 0
    said = capsys.readouterr().out
    assert "  family      linear       φ(q)(φ(k)ᵀv)" in said
    assert "  refuses attention dropout: 'linear'\n  refuses returning the attention weights: 'linear'" in said
    assert cli.main(["check", "quest"]) == 0
    assert "    scale = null: factor on the logits" in capsys.readouterr().out
