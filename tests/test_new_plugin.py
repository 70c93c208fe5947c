"""`quest new-plugin`: what it writes works at once, and what it cannot write it refuses without a trace."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from quest_core import ConfigError, PluginError, QuestError, cli
from quest_core.cli import template
from quest_core.hosts import discovery

ROOT = Path(__file__).resolve().parents[1]


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def installed(folder: Path, site: Path) -> dict[str, str]:
    """The process environment in which the plugin in `folder` is installed, as an editable install would."""
    about = project(folder)
    meta = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    meta.mkdir(parents=True)
    requires = [f'{r}; extra == "{extra}"' for extra, rows in about["optional-dependencies"].items() for r in rows]
    rows = ["Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {about['version']}"]
    rows += [f"Provides-Extra: {extra}" for extra in about["optional-dependencies"]]
    (meta / "METADATA").write_text("\n".join([*rows, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
    groups = about["entry-points"]
    lines = [[f"[{group}]", *(f"{name} = {value}" for name, value in groups[group].items())] for group in groups]
    (meta / "entry_points.txt").write_text("\n".join(line for group in lines for line in group) + "\n")
    paths = os.pathsep.join(map(str, (site, folder / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "QUEST_NO_SKIP": "1"}


def call(*command: object, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


# "abc-1" sorts before quest_core and has a hyphen; "tiny" sorts after.
@pytest.mark.parametrize("name", ["abc-1", pytest.param("tiny", marks=pytest.mark.slow)])
def test_the_tests_of_a_new_plugin_pass_at_once(tmp_path: Path, name: str) -> None:
    folder = template.new_plugin(name, out=tmp_path)
    env = installed(folder, tmp_path / "site")
    report = tmp_path / "report.xml"
    call(sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", cwd=folder, env=env)
    suite = ElementTree.parse(report).getroot()[0]
    assert int(suite.attrib["tests"]) > 25
    doctor = "from quest_core.cli import main; main(['doctor'])"
    listed = call(sys.executable, "-c", doctor, cwd=tmp_path, env=env)
    assert re.search(rf"  {name} +quest-{name} 0.1.0: ok with torch {re.escape(version('torch'))}\n", listed)


def test_entry_points_name_what_is_there(tmp_path: Path) -> None:
    folder = template.new_plugin("my-lab", out=tmp_path)
    about = project(folder)
    assert about["name"] == folder.name == "quest-my-lab"
    assert about["entry-points"] == {
        "quest.adapters": {"my-lab": "quest_my_lab.adapter:MyLabAdapter"},
        "quest.adapter_info": {"my-lab": "quest_my_lab.info:INFO"},
        "quest.benchmarks": {"my-lab/recall": "quest_my_lab.bench.tasks:run_recall"},
    }
    for group in about["entry-points"].values():
        for value in group.values():
            module, _, attribute = value.partition(":")
            tree = ast.parse(Path(folder, "src", *module.split(".")).with_suffix(".py").read_text())
            defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            defined |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
            assert attribute in defined


def test_info_says_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = template.new_plugin("mini", attention_class="pytest.layers.attention:Attention", out=tmp_path)
    monkeypatch.syspath_prepend(folder / "src")
    info = discovery.load_info("quest_mini.info:INFO")
    assert info["api"] == discovery.API_VERSION
    assert (info["name"], info["host"], info["module"]) == ("mini", "pytest", "pytest")
    # Without versions of its own, the host's installed one is the oldest that is supported, and the one tested with.
    assert project(folder)["optional-dependencies"]["host"] == [f"pytest>={pytest.__version__}"]
    assert f"pytest=={pytest.__version__}\n" in (folder / "constraints.txt").read_text()
    assert re.search(r"^torch==[\d.]+$", (folder / "constraints.txt").read_text(), re.MULTILINE)
    assert '    ("pytest.layers.attention", "Attention"),\n' in (folder / "src/quest_mini/adapter.py").read_text()


def test_a_host_keeps_the_versions_it_was_given(tmp_path: Path) -> None:
    folder = template.new_plugin("mini", host_distribution="No.Such-Host>=1.0,<2", out=tmp_path)
    assert project(folder)["optional-dependencies"]["host"] == ["No.Such-Host>=1.0,<2"]
    assert '"module": "no_such_host"' in (folder / "src/quest_mini/info.py").read_text()
    assert "==" not in (folder / "constraints.txt").read_text().replace("torch==", "")


def test_a_real_attention_class_is_a_site(tmp_path: Path) -> None:
    """A host whose attention has the common layout needs its name alone."""
    (tmp_path / "their_model.py").write_text(
        "from torch import nn\n"
        "class Attention(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.num_heads, self.qkv, self.proj = 2, nn.Linear(8, 24), nn.Linear(8, 8)\n"
        "        self.attn_drop = nn.Dropout(0.0)\n"
    )
    folder = template.new_plugin("their", attention_class="their_model:Attention", out=tmp_path)
    env = installed(folder, tmp_path / "site")
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = (
        "import torch, quest_core, their_model\n"
        "from quest_their.adapter import TheirAdapter\n"
        "model = torch.nn.Sequential(their_model.Attention())\n"
        "model, report = quest_core.inject(model, 'quest+gqa(kv_heads=1)', adapter=TheirAdapter())\n"
        "print(report, model(torch.randn(1, 3, 8)).shape)\n"
        "other = torch.nn.Sequential(their_model.Attention())\n"
        "other[0].q_norm = torch.nn.LayerNorm(4)\n"
        "try: quest_core.inject(other, 'quest', adapter=TheirAdapter())\n"
        "except quest_core.InjectionError as error: print(error)"
    )
    # their_model is no distribution, so importing the package, which installs the adapter, is refused by name.
    refused = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "PluginError: plugin 'their' is unsupported: their_model is not installed" in refused.stderr
    (tmp_path / "site" / "their_model-3.dist-info").mkdir()
    (tmp_path / "site" / "their_model-3.dist-info" / "METADATA").write_text("Name: their_model\nVersion: 3\n")
    out = call(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert out.startswith("attention=quest+gqa(kv_heads=1) in 1 module (Attention; 288 -> 216 parameters)")
    assert "[1, 3, 8]" in out
    assert "Attention also has q_norm, which InjectedAttention would leave out" in out


@pytest.mark.parametrize("name", ["abc-1", "tiny"])
def test_what_is_written_is_clean(tmp_path: Path, name: str) -> None:
    folder = template.new_plugin(name, attention_class="abc.layers:Attention", out=tmp_path)
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert not re.search(r"TODO|FIXME|XXX|NotImplementedError|\$|\.tmpl|PACKAGE\b", text)
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff, which lints what was written, is not installed")
    package = f"quest_{name.replace('-', '_')}"
    settings = ["--config", ROOT / "pyproject.toml"]
    ours = ["--config", f"lint.isort.known-first-party = ['quest_core', '{package}']"]
    call(sys.executable, "-m", "ruff", "check", "--no-cache", *settings, *ours, folder, cwd=tmp_path)
    call(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *settings, folder, cwd=tmp_path)


def test_every_template_file_is_written(tmp_path: Path) -> None:
    folder = template.new_plugin("mini", out=tmp_path)
    sources = ROOT / "plugins" / "_template"
    expected = {
        str(path.relative_to(sources)).replace("PACKAGE", "quest_mini").removesuffix(".tmpl")
        for path in sources.rglob("*")
        if path.is_file()
    }
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == expected


def test_a_new_plugins_wheel_carries_licence_types_and_links(tmp_path: Path) -> None:
    folder = template.new_plugin("mini", out=tmp_path)
    about, core = project(folder), project(ROOT)
    assert (about["license"], about["license-files"]) == (core["license"], ["LICENSE"])
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "src/quest_mini/py.typed").is_file()
    assert set(about["classifiers"]) <= set(core["classifiers"])
    assert about["dependencies"] == ["quest-core>=0.1"]
    assert about["urls"]


def test_the_page_on_adapters_shows_what_is_written(tmp_path: Path) -> None:
    folder = template.new_plugin("timm", out=tmp_path)
    written = {line.strip() for path in folder.rglob("*") if path.is_file() for line in path.read_text().splitlines()}
    page = (ROOT / "docs" / "writing-an-adapter.md").read_text()
    shown = "\n".join(re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL))
    lines = {line.strip() for line in shown.splitlines()} - {"", "..."}
    assert len(lines) > 30
    assert lines - written == set()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My_Host", "did you mean 'my-host'"),
        ("3d", "starting with a letter"),
        ("a--b", "did you mean 'a-b'"),
        ("", "lower-case letters"),
        ("../evil", "did you mean 'evil'"),
        ("quest-tsai", "write 'tsai'"),
        ("core", "which quest-core uses itself"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        template.new_plugin(name, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_distribution", 'timm"]\nevil = ["'),
        ("host_distribution", "-r file"),
        ("host_module", "a-b"),
        ("attention_class", "timm.Attention"),
        ("attention_class", "timm:layers.Attention"),
    ],
)
def test_hosts_that_cannot_be_are_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key.replace('_', '-')} is .*; write "):
        template.new_plugin("mini", out=tmp_path, **{key: value})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "quest-mini"
    mine.mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        template.new_plugin("mini", out=tmp_path)
    assert list(mine.iterdir()) == []
    mine.rmdir()
    mine.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        template.new_plugin("mini", out=tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        template.new_plugin("mini", out=tmp_path / "nowhere")


@pytest.mark.parametrize(("error", "raised"), [(OSError(28, "No space left"), ConfigError), (ValueError(), ValueError)])
def test_nothing_is_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name == "tasks.py":
            raise error
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(raised):
        template.new_plugin("mini", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_an_installed_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "discover", lambda: [discovery.Record("mini", "quest-mini", "1.2", "ok")])
    with pytest.raises(PluginError, match="quest-mini 1.2; choose another name, or pip uninstall quest-mini"):
        template.new_plugin("mini", out=tmp_path)


def test_the_command_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-plugin", "mini"]) == 0
    first, *commands = capsys.readouterr().out.splitlines()
    assert first == "wrote quest-mini; next:"
    assert [command.split("  #")[0].strip() for command in commands] == [
        "pip install -e 'quest-mini[host,test]'",
        "python -m pytest quest-mini",
        "grep -rn 'Host [1-6]' quest-mini",
    ]
    assert cli.main(["new-plugin", "mini"]) == 2
    assert capsys.readouterr().err.startswith("quest: 'quest-mini' exists already")


def test_a_missing_template_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "__file__", str(tmp_path / "quest_core" / "cli" / "template.py"))
    with pytest.raises(QuestError, match="lacks the template"):
        template.new_plugin("mini", out=tmp_path)
