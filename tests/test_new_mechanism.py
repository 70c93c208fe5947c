"""`quest new-mechanism`: its files work at once, in the suites, in a model, and as the tutorial shows it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from quest_core import ConfigError, cli
from quest_core.cli import template

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


WRITTEN = {"score": "power", "normalizer": "nothing", "grouping": "turns", "family": "soft-linear"}
EXAMPLE = ROOT / "examples" / "third_party_mechanism"


@pytest.mark.parametrize("axis", [pytest.param(axis, marks=pytest.mark.slow) for axis in WRITTEN])
def test_the_tests_of_a_new_mechanism_pass_at_once(tmp_path: Path, axis: str) -> None:
    folder = template.new_mechanism(WRITTEN[axis], axis=axis, out=tmp_path)
    env = installed(folder, tmp_path / "site")
    out = call(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder, cwd=tmp_path, env=env)
    assert re.search(r"^\d\d passed", out, re.MULTILINE), out
    listed = "from quest_core.cli import main; main(['list'])"
    assert WRITTEN[axis] in call(sys.executable, "-c", listed, cwd=tmp_path, env=env)


SUITE = """
import torch
from quest_core.hosts.torch import TorchAdapter
from quest_core.testing import AdapterConformance

class TestEncoder(AdapterConformance):
    adapter = TorchAdapter()
    sites = 1
    def make_model(self): return torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    def make_inputs(self): return (torch.randn(2, 3, 8),)

for name in dir(TestEncoder):
    if name.startswith("test_") and "from_elsewhere" not in name:
        setattr(TestEncoder, name, None)
"""


def test_a_new_score_of_at_most_twenty_lines_appears_in_the_list_and_in_both_suites(tmp_path: Path) -> None:
    """Without an edit elsewhere. The benchmark has this test too, and ./dev installs the example with every host."""
    folder = template.new_mechanism("power", out=tmp_path)
    assert len((folder / "src/quest_power/__init__.py").read_text().splitlines()) <= 20
    env = installed(folder, tmp_path / "site")
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/test_encoder.py").write_text(SUITE)
    code = "import sys; from quest_core.cli import main; sys.exit(main(sys.argv[1:]))"

    def quest(*arguments: object) -> str:
        return call(sys.executable, "-c", code, *arguments, cwd=tmp_path, env=env)

    assert "From quest-power 0.1.0\n  power " in quest("list")
    assert re.search(r"\n\d\d checks, all passed\n", quest("check", "--mechanism", "power"))
    (row,) = re.findall(r"ok +2/2 +a mechanism from elsewhere.*", quest("check", "--plugin", "suite"))
    assert "refused by name" in row


def test_the_example_is_what_is_written(tmp_path: Path) -> None:
    folder = template.new_mechanism("power", out=tmp_path)
    written = {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
    tracked = subprocess.run(["git", "ls-files", "."], cwd=EXAMPLE, capture_output=True, text=True, check=False).stdout
    names = [Path(name) for name in tracked.splitlines()] or [p.relative_to(EXAMPLE) for p in EXAMPLE.rglob("*.*")]
    assert {name: (EXAMPLE / name).read_text() for name in names} == written


def test_a_wheel_of_the_example_runs_in_every_way_a_mechanism_can_be_asked_for(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", tmp_path / "site"]
    copy = tmp_path / "source"
    for path in EXAMPLE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            (copy / path.relative_to(EXAMPLE)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(EXAMPLE)).write_bytes(path.read_bytes())
    call(*pip, "--quiet", copy, cwd=tmp_path)
    code = (
        "import torch, quest_core\n"
        "from quest_core.testing import check_mechanism\n"
        "model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)\n"
        "print(quest_core.inject(model, 'power(p=3)+gqa(kv_heads=2)')[1])\n"
        "check_mechanism('power')\n"
        "q = torch.randn(7, 4, 8)\n"
        "print(quest_core.attention_packed(q, q, q, 'power', cu_seqlens=torch.tensor([0, 3, 7])).shape)\n"
        "print(sorted(quest_core.Monitor(model).collect()))\n"
    )
    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": ""}
    out = call(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert out.startswith("attention=power+gqa(kv_heads=2, p=3.0) in 1 module")
    assert "[7, 4, 8]" in out


@pytest.mark.parametrize("axis", WRITTEN)
def test_what_is_written_is_clean(tmp_path: Path, axis: str) -> None:
    folder = template.new_mechanism(WRITTEN[axis], axis=axis, out=tmp_path)
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert not re.search(r"TODO|FIXME|XXX|NotImplementedError|\$|\.tmpl|PACKAGE\b", text)
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project(folder)["dependencies"] == ["quest-core>=0.1"]
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff, which lints what was written, is not installed")
    package = f"quest_{WRITTEN[axis].replace('-', '_')}"
    settings = ["--config", ROOT / "pyproject.toml"]
    ours = ["--config", f"lint.isort.known-first-party = ['quest_core', '{package}']"]
    call(sys.executable, "-m", "ruff", "check", "--no-cache", *settings, *ours, folder, cwd=tmp_path)
    call(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *settings, folder, cwd=tmp_path)


def test_the_tutorial_shows_what_is_written(tmp_path: Path) -> None:
    written: set[str] = set()
    for axis, name in WRITTEN.items():
        folder = template.new_mechanism(name, axis=axis, out=tmp_path)
        for path in folder.rglob("*"):
            if path.is_file():
                written |= {line.strip() for line in path.read_text().splitlines()}
    page = (ROOT / "docs" / "writing-a-mechanism.md").read_text()
    shown = "\n".join(re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL))
    lines = {line.strip() for line in shown.splitlines()} - {"", "..."}
    assert len(lines) > 30
    assert lines - written == set()


@pytest.mark.parametrize(
    ("name", "axis", "message"),
    [
        ("Power", "score", "did you mean 'power'"),
        ("quest", "score", "which is a mechanism already"),
        ("sinkhorn", "score", "which is a mechanism already"),
        ("core", "score", "which quest-core uses itself"),
        ("lambda", "score", "a keyword of Python; choose another, such as 'my-lambda'"),
        ("none", "family", "a keyword of Python"),  # class None
        ("mini", "scroe", "did you mean 'score'"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str, axis: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        template.new_mechanism(name, axis=axis, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-mechanism", "mini", "--axis", "normalizer"]) == 0
    first, *commands = capsys.readouterr().out.splitlines()
    assert first == "wrote quest-mini; next:"
    assert [command.split("  #")[0].strip() for command in commands] == [
        "pip install -e 'quest-mini[test]'",
        "python -m pytest quest-mini",
        "quest list",
    ]
    assert cli.main(["new-mechanism", "mini"]) == 2
    assert capsys.readouterr().err.startswith("quest: 'quest-mini' exists already")
