"""`quest new-plugin`: its files work at once, and a refusal leaves no file."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
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


THEIRS = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Fused(nn.Module):
    def __init__(self, dim, num_heads=8, attn_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.Identity()
        self.attn_drop: nn.Module = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = (split(y, self.num_heads) for y in self.qkv(x).chunk(3, -1))
        out = sdpa(q, k, v, attn_mask, self.attn_drop.p if self.training else 0.0, is_causal)
        return self.proj(out.transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    def __init__(self, dim, heads, dim_head=8, n_rep=2, dropout=0.1):
        super().__init__()
        self.dim_head, self.n_rep, self.causal, self.attend = dim_head, n_rep, True, print
        self.dim_head = dim_head
        self.n_rep = n_rep
        self.dropout = dropout  # the name of a class attribute of ours
        self.wq = nn.Linear(dim, heads * dim_head, bias=False)
        self.wk = nn.Linear(dim, heads * dim_head // n_rep, bias=False)
        self.wv = nn.Linear(dim, heads * dim_head // n_rep, bias=False)
        self.wo = nn.ModuleList([nn.Linear(heads * dim_head, dim), nn.Dropout(0.1)])

    def forward(self, x, *, layers=1, **kwargs):
        q, k, v = (split(y, y.shape[-1] // self.dim_head) for y in (self.wq(x), self.wk(x), self.wv(x)))
        k, v = (y.repeat_interleave(self.n_rep, 1) for y in (k, v))
        out = sdpa(q, k, v, None, self.dropout if self.training else 0.0, is_causal=True)
        for layer in self.wo:
            x = layer(out.transpose(1, 2).flatten(2)) if layer is self.wo[0] else layer(x)
        return x


class Cross(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(context_dim or query_dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        q, (k, v) = self.to_q(x), self.to_kv(x if context is None else context).chunk(2, -1)
        q, k, v = (split(y, self.heads) for y in (q, k, v))
        return self.to_out(sdpa(q, k, v, mask).transpose(1, 2).flatten(2))


class Configured(Fused):
    def __init__(self, config):
        super().__init__(config.dim)


class Unlike(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.layer = 4, nn.Linear(4, 12)
        self.layer = nn.Linear(4, 12)
        self.heads = 4

    def forward(self, x):
        return x
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A framework `their_model` with attention classes, which can be imported."""
    (tmp_path / "their_model.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("their_model", None)


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


def test_info_says_what_was_asked_for(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = template.new_plugin("mini", host_distribution="pytest", attention_class="their_model:Fused", out=theirs)
    monkeypatch.syspath_prepend(folder / "src")
    info = discovery.load_info("quest_mini.info:INFO")
    assert info["api"] == discovery.API_VERSION
    assert (info["name"], info["host"], info["module"]) == ("mini", "pytest", "their_model")
    # Without versions of its own, the host's installed one is the oldest that is supported, and the one tested with.
    assert project(folder)["optional-dependencies"]["host"] == [f"pytest>={pytest.__version__}"]
    assert f"pytest=={pytest.__version__}\n" in (folder / "constraints.txt").read_text()
    assert re.search(r"^torch==[\d.]+$", (folder / "constraints.txt").read_text(), re.MULTILINE)
    assert '    ("their_model", "Fused"): InjectedFused,\n' in (folder / "src/quest_mini/adapter.py").read_text()


def test_a_class_of_the_current_folder_is_found_and_needs_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_of_mine.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert cli.main(["new-plugin", "mini", "--attention-class", "model_of_mine:Fused"]) == 0
    assert project(tmp_path / "quest-mini")["optional-dependencies"]["host"] == []
    assert sys.modules.pop("model_of_mine")


def test_a_host_keeps_the_versions_it_was_given(tmp_path: Path) -> None:
    folder = template.new_plugin("mini", host_distribution="No.Such-Host>=1.0,<2", out=tmp_path)
    assert project(folder)["optional-dependencies"]["host"] == ["No.Such-Host>=1.0,<2"]
    assert '"module": "no_such_host"' in (folder / "src/quest_mini/info.py").read_text()
    assert "==" not in (folder / "constraints.txt").read_text().replace("torch==", "")


@pytest.mark.parametrize(
    "kind", ["Fused", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Grouped", "Cross"))]
)
def test_an_adapter_for_a_class_passes_its_tests_at_once(theirs: Path, kind: str) -> None:
    """Fused, separate and shared projections, another sequence of keys, attributes with our names."""
    folder = template.new_plugin("their", attention_class=f"their_model:{kind}", out=theirs)
    env = installed(folder, theirs / "site")
    env["PYTHONPATH"] += os.pathsep + str(theirs)
    if kind == "Cross":  # `dropout` is that of the output
        layers = folder / "src/quest_their/layers.py"
        assert (
            "dropout_name = " not in layers.read_text().partition("class InjectedCross")[2].partition("def attend")[0]
        )
    report = theirs / "report.xml"
    call(sys.executable, "-m", "pytest", "-q", "-k", f"Test{kind}", f"--junitxml={report}", cwd=folder, env=env)
    assert int(ElementTree.parse(report).getroot()[0].attrib["tests"]) > 25


def test_what_a_written_adapter_does_not_use_is_refused(theirs: Path) -> None:
    folder = template.new_plugin("their", attention_class="their_model:Fused", out=theirs)
    env = installed(folder, theirs / "site")
    env["PYTHONPATH"] += os.pathsep + str(theirs)
    code = (
        "import torch, quest_core, their_model\n"
        "from quest_their.adapter import TheirAdapter\n"
        "model = torch.nn.Sequential(their_model.Fused(16, 2))\n"
        "model, report = quest_core.inject(model, 'quest+gqa(kv_heads=1)', adapter=TheirAdapter())\n"
        "print(report, model(torch.randn(1, 3, 16)).shape)\n"
        "try: model[0](torch.randn(1, 3, 16), is_causal=True)\n"
        "except quest_core.UnsupportedError as error: print(error)\n"
        "other = torch.nn.Sequential(their_model.Fused(16, 2))\n"
        "other[0].q_norm = torch.nn.LayerNorm(8)\n"
        "try: quest_core.inject(other, 'quest', adapter=TheirAdapter())\n"
        "except quest_core.InjectionError as error: print(error)"
    )
    out = call(sys.executable, "-c", code, cwd=theirs, env=env)
    assert out.startswith("attention=quest+gqa(kv_heads=1) in 1 module (Fused; 1,088 -> 816 parameters)")
    assert "[1, 3, 16]" in out
    assert "InjectedFused was given is_causal, which it does not use yet" in out
    assert "Fused also has q_norm, which InjectedFused would leave out" in out


def test_a_class_that_cannot_be_built_by_guessing_has_no_test(theirs: Path) -> None:
    folder = template.new_plugin("their", attention_class="their_model:Configured", out=theirs)
    assert "class InjectedConfigured(Injected)" in (folder / "src/quest_their/layers.py").read_text()
    assert "Configured" not in (folder / "tests/test_conformance.py").read_text()
    assert "projections in qkv; heads in num_heads; dropout in attn_drop; output in proj; refuses attn_mask" in (
        (folder / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("their_model:Nothing", "has no attribute 'Nothing'"),
        ("no_such_module:Attention", "No module named 'no_such_module'.*pip install no_such_module"),
        ("their_model:split", "cannot be read"),
        ("their_model:Unlike", "has no projections of a known name .Linear layers: layer;"),
    ],
)
def test_classes_that_are_not_understood_are_refused(theirs: Path, attention: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        template.new_plugin("mini", attention_class=attention, out=theirs)
    assert not (theirs / "quest-mini").exists()


@pytest.mark.parametrize("name", ["abc-1", "tiny"])
@pytest.mark.parametrize("kind", ["Fused", "Grouped", "Cross"])
def test_what_is_written_is_clean(theirs: Path, name: str, kind: str) -> None:
    folder = template.new_plugin(name, attention_class=f"their_model:{kind}", out=theirs)
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert not re.search(r"TODO|FIXME|XXX|NotImplementedError|\$|\.tmpl|PACKAGE\b", text)
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff, which lints what was written, is not installed")
    package = f"quest_{name.replace('-', '_')}"
    settings = ["--config", ROOT / "pyproject.toml"]
    ours = ["--config", f"lint.isort.known-first-party = ['quest_core', '{package}']"]
    call(sys.executable, "-m", "ruff", "check", "--no-cache", *settings, *ours, folder, cwd=folder)
    call(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *settings, folder, cwd=folder)


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
    with pytest.raises(ConfigError, match="is not a folder"):
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
