"""Promises that the repository makes as a whole: what every plugin ships, what imports what, what ./dev can do."""

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import quest_core
from devtools import environments, pytest_plugin, running, versions
from integration_tests.gpu import command as gpu
from quest_core.cli.new import _OURS

ROOT = Path(__file__).resolve().parents[1]
SITE = "https://quest-attention.github.io/quest/"
PROJECTS = sorted(ROOT.glob("plugins/*/pyproject.toml"))
HOSTS = [environments.home(name) for name in environments.hosts() if name != "quest-zoo"]  # which has no adapter
on_hosts = pytest.mark.parametrize("plugin", HOSTS, ids=lambda p: p.name)


def package(plugin):
    return plugin.name.replace("-", "_")


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def top_level_imports(path):
    """The first name of every absolute import in a file, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


# --- what git holds ---------------------------------------------------------------------------------------------------


def test_git_holds_no_generated_file():
    """Reports are made from results.parquet and run.json, and checkpoints by trainings."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    reports = r"(^|/)(report\.(html|md)|report/[^/]*\.(png|svg)|vega[^/]*\.js)$"
    made = re.compile(rf"{reports}|\.(ckpt|safetensors)$|(^|/)(dist|site|\.cache)/")
    assert [name for name in names.splitlines() if made.search(name)] == []


# --- plugins --------------------------------------------------------------------------------------------------------


@on_hosts
def test_entry_points_name_things_that_exist(plugin):
    groups = project(plugin)["entry-points"]
    assert len(set(groups["quest.adapters"].values())) == 1
    tasks = project(ROOT / "plugins" / "quest-suites")["entry-points"]
    assert plugin.name.removeprefix("quest-") in tasks["quest.suites"]
    own = package(plugin).removeprefix("quest_")
    values = [(plugin, value) for group in groups.values() for value in group.values()]
    values += [
        (ROOT / "plugins" / "quest-suites", value)
        for group in tasks.values()
        for value in group.values()
        if value.startswith(f"quest_suites.{own}.")
    ]
    for plugin, value in values:
        module, _, attribute = value.partition(":")
        path = plugin / "src" / Path(*module.split(".")).with_suffix(".py")
        if not path.exists():
            path = plugin / "src" / Path(*module.split(".")) / "__init__.py"
        defined = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
        assert attribute in defined or re.search(rf"^{attribute}\b.*=", path.read_text(), re.MULTILINE), value


@on_hosts
def test_a_plugin_pins_its_environment_and_not_its_users(plugin):
    assert re.search(r"^torch==", (plugin / "constraints.txt").read_text(), re.MULTILINE)
    extras = project(plugin)["optional-dependencies"]
    assert [r for r in extras["host"] if "==" in r] == []
    assert "quest-core[test]" in extras["test"]  # `minversion` of the root's settings holds for its suite too
    assert [r for r in extras["test"] if r.startswith("pytest")] == []


@pytest.mark.parametrize("folder", [p.parent for p in PROJECTS], ids=lambda p: p.name)
def test_a_wheel_carries_licence_types_and_links(folder):
    """Checks the files and settings that hatchling reads; hatchling itself is not in the environment."""
    about, core, source = project(folder), project(ROOT), folder / "src" / package(folder)
    assert about["license"] == core["license"]
    assert about["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert set(about["classifiers"]) <= set(core["classifiers"])
    assert (source / "py.typed").is_file()
    wheel = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": [f"src/{package(folder)}"]}  # every file below that git does not ignore
    assert [r for r in about["dependencies"] if r.startswith("quest-core")] == ["quest-core>=0.1"]
    assert {"Homepage", "Documentation", "Source", "Issues"} <= about["urls"].keys()
    assert all(url.startswith(("https://github.com/quest-attention/quest", SITE)) for url in about["urls"].values())


@pytest.mark.parametrize("folder", [ROOT, *(p.parent for p in PROJECTS)], ids=lambda p: p.name)
def test_dependencies_are_ranges_not_pins(folder):
    assert [r for r in project(folder).get("dependencies", []) if re.search(r"===?", r)] == []


def test_every_distribution_has_the_version_of_the_core_and_a_change_log():
    release = runpy.run_path(str(ROOT / "release" / "build.py"), run_name="release")
    release["check_versions"]()
    assert {project(p.parent)["version"] for p in PROJECTS} == {quest_core.__version__}
    assert f"version: {quest_core.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_a_version_is_written_everywhere(tmp_path):
    for path in (ROOT / "quest_core" / "__init__.py", ROOT / "CHANGELOG.md", *(p for p in PROJECTS)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    release = runpy.run_path(str(ROOT / "release" / "build.py"), run_name="release")
    release["version"].__globals__.update(ROOT=tmp_path, SOURCE=tmp_path / "quest_core" / "__init__.py")
    release["set_version"]("7.8.9")
    assert release["version"]() == "7.8.9"
    assert {project(p.parent)["version"] for p in tmp_path.glob("plugins/*/pyproject.toml")} == {"7.8.9"}
    with pytest.raises(release["Failure"], match="CHANGELOG.md has no section '## 7.8.9'"):
        release["check_versions"]()


def test_pre_commit_and_ci_use_the_same_ruff():
    (version,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{version}" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_workflows_call_commands_of_dev_that_exist():
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    help_ = subprocess.run([sys.executable, ROOT / "dev", "--help"], capture_output=True, text=True, check=True).stdout
    used = set(re.findall(r"(?:\./|python3 )dev ([\w-]+)", text))
    assert [name for name in used if f"./dev {name}" not in help_] == []
    assert re.findall(r"uses: (?!\./)\S+@(?![0-9a-f]{40}  # v)\S+", text) == []  # actions are pinned by hash


# --- imports --------------------------------------------------------------------------------------------------------


def test_core_depends_on_torch_and_packaging():
    allowed = {*sys.stdlib_module_names, "quest_core", "torch", "packaging"}
    extras = {  # `test`, `watch`, and what runs inside of a host
        "testing": {"pytest", "hypothesis"},
        "curves.py": {"matplotlib"},
        "pictures.py": {"matplotlib"},
        "lightning.py": {"lightning", "pytorch_lightning"},
    }
    foreign = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "quest_core").rglob("*.py")
        for name in top_level_imports(path)
        if name not in allowed.union(*(more for part, more in extras.items() if part in path.parts))
    }
    assert foreign == set()


def test_lists_that_cannot_read_the_folder_name_every_plugin():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {package(p.parent) for p in PROJECTS} | {"quest_core"}
    assert set(linter["root_packages"]) == {"quest_research", *packages}
    assert set(re.findall(r"\w+", " ".join(linter["contracts"][1]["layers"]))) == {"quest_research", *packages}
    assert {f"quest_{name}" for name in _OURS.pattern.split("|")} == packages


# --- tests and tools ------------------------------------------------------------------------------------------------


def test_no_mechanism_is_known_by_its_name_or_class():
    """What core and plugins ask of a mechanism is declared in its class, or seen in what its module does."""
    names = set(quest_core.list_mechanisms())
    files = [path for path in (ROOT / "quest_core/mechanisms").glob("*.py") if path.stem != "base"]
    classes = {
        node.name for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    }
    sources = [*(ROOT / "quest_core").rglob("*.py"), *ROOT.glob("plugins/quest-*/src/**/*.py")]
    # Benchmarks choose what they compare; the other two name PyTorch's operation softmax.
    leave_out = {"mechanisms", "testing", "quest_suites", "quest_bench", "configs", "following.py", "search.py"}
    found = []
    for path in (path for path in sources if not leave_out & set(path.relative_to(ROOT).parts)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                said = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)} & names
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
                said = {c.id for c in ast.walk(node) if isinstance(c, ast.Name)} & classes
            else:
                continue
            if said:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_cuda_tests_live_where_dev_gpu_looks():
    folders = [ROOT / "tests", ROOT / "integration_tests", *(p.parent / "tests" for p in PROJECTS)]
    marked = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("test_*.py")
        if re.search(r"^\s*(@|pytestmark\b.*)pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    ]
    assert [path for path in marked if not path.startswith("integration_tests/gpu/")] == []


def test_dev_needs_nothing_but_the_standard_library():
    own = {"devtools", "integration_tests"}
    for name in ("dev", "integration_tests/gpu/command.py", "devtools/environments.py", "devtools/running.py"):
        assert set(top_level_imports(ROOT / name)) - own <= sys.stdlib_module_names, name


def dev(*arguments):
    # -I and -S: no site-packages, as on a machine where nothing is installed yet.
    command = [sys.executable, *(() if "gpu" in arguments else ("-I", "-S")), str(ROOT / "dev"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_dev_help_teaches_every_command():
    text = dev("--help").stdout
    for name in ("setup", "lint", "test", "demo", "docs", "install-test", "release", "gpu", "gpu fetch"):
        assert f"./dev {name}" in text
    assert "no command 'tset'" in dev("tset").stderr


def test_sessions_and_environments_are_those_of_the_help():
    sessions = re.search(r"SESSIONS = (\(.*\))", (ROOT / "dev").read_text())
    defined = re.findall(r"^@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert set(ast.literal_eval(sessions[1])) == set(defined)
    assert json.loads(dev("environments").stdout) == ["core", *environments.hosts()]
    assert {"core-oldest", "quest-timm"} <= set(json.loads(dev("environments", "--all").stdout))
    with pytest.raises(environments.Failure, match="unknown environment 'quest-nothing'; choose from: core, "):
        environments.environment("quest-nothing")


@pytest.mark.parametrize(
    ("said", "environ", "wanted"),
    [
        ("", {}, {}),
        ("global.index-url='https://a/simple'", {}, {"UV_DEFAULT_INDEX": "https://a/simple"}),
        (":env:.index-url='https://b'\nglobal.index-url='https://a'", {}, {"UV_DEFAULT_INDEX": "https://b"}),
        ("install.extra-index-url='\\nhttps://a\\nhttps://b'", {}, {"UV_INDEX": "https://a https://b"}),
        ("global.extra-index-url='file:///nothing/simple https://b'", {}, {"UV_INDEX": "https://b"}),
        ("global.find-links='/ /nothing https://b'", {}, {"UV_FIND_LINKS": "/,https://b"}),
        ("global.cert='/c.pem'", {}, {"SSL_CERT_FILE": "/c.pem"}),
        ("global.cert='/c.pem'", {"SSL_CERT_FILE": "/d.pem"}, {}),
    ],
)
def test_uv_installs_from_where_pip_does(said, environ, wanted):
    """noxfile.py imports nox, which the core's environment lacks: only the function is read."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("is_missing", "uv_settings")]
    names = {"ast": ast, "re": re, "Path": Path, "Mapping": Mapping, "ROOT": ROOT, "running": running}
    exec(compile(tree, "noxfile.py", "exec"), names)
    settings = names["uv_settings"](said, environ | {"XDG_CACHE_HOME": str(ROOT)})
    assert settings == wanted | {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}


def test_dev_gpu_says_what_it_needs(tmp_path):
    for arguments, said in (((), "FOLDER"), (("--all",), "FOLDER"), ((tmp_path, "quest-nothing"), "quest-nothing")):
        done = dev("gpu", "fetch", *arguments)
        assert done.returncode == 1
        assert said in done.stderr
    done = dev("gpu", "--wheels", tmp_path)
    assert done.returncode == 1
    assert f"--wheels is '{tmp_path}', where no wheels are" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU whose absence is tested")
def test_dev_gpu_without_a_gpu_runs_the_cpus_part_and_says_so():
    done = dev("gpu", "integration_tests/gpu/test_table.py", "-k", "suite_of_quest_bench")
    assert done.returncode == 77, done.stdout + done.stderr
    assert "2 passed, 0 failed" in done.stdout
    assert "no CUDA device" in done.stderr
    assert "were not run" in done.stderr


def test_environments_for_a_gpu_see_pytorch_and_not_its_neighbors(tmp_path):
    assert gpu.link_pytorch(tmp_path)
    code = "import importlib.util, torch; torch.ones(2) @ torch.ones(2); print(importlib.util.find_spec('pytest'))"
    command = [sys.executable, "-S", "-c", code]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


def test_the_core_is_tested_with_the_oldest_pytorch_it_declares():
    (declared,) = (r for r in project(ROOT)["dependencies"] if r.startswith("torch"))
    made = environments.environment("core-oldest")
    assert made.requirements == ("-e", f"{ROOT}[test,dev,docs]")
    assert f"\n{declared.replace('>=', '==')}." in made.constraints.read_text()
    assert environments.suites("core-oldest") == {"core-oldest": [ROOT / "tests"]}
    assert "core-newest" in environments.further()


def test_a_path_chooses_the_environments_of_its_own():
    core, mmseg, other = (
        str(ROOT / path) for path in ("tests/test_config.py", "plugins/quest-mmseg/tests", "integration_tests/gpu")
    )
    chosen = environments.selection([core, "-k", "mistake", f"{mmseg}/"])
    assert chosen == {"core": [core], "quest-mmseg": [f"{mmseg}/"]}
    everywhere = environments.selection([f"{core}::test_grammar", mmseg, other], everywhere=True)
    assert everywhere["core"] == [f"{core}::test_grammar", other]
    assert everywhere["core-oldest"] == everywhere["core-newest"] == [f"{core}::test_grammar"]
    assert everywhere["quest-mmseg-onedl"] == [mmseg]
    assert "quest-tsai" not in everywhere
    assert not environments.selection(["--co"], everywhere=True)


@pytest.mark.parametrize("page", ["dev", "CONTRIBUTING.md", "docs/development.md"])
def test_the_example_of_one_test_selects_a_test(page):
    path, word = re.search(r"\./dev test (\S+) -k (\w+)", (ROOT / page).read_text()).groups()
    assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text(), re.MULTILINE)


def test_an_integration_test_runs_in_the_environment_that_it_declares():
    folder = ROOT / "integration_tests"
    assert environments.owner(folder / "gpu" / "test_pointcept_patches.py") == "quest-pointcept"
    hosts = {name.replace("-", "_") for name in environments.hosts()}
    for path in folder.rglob("test_*.py"):
        imported = {name.partition(".")[0] for name in top_level_imports(path)} & hosts
        assert imported <= {environments.owner(path).replace("-", "_")}, path


# --- the pytest plugin that all tests run under -----------------------------------------------------------------------


DRAWING = """
import random
import numpy, pytest, torch
from hypothesis import given, settings, strategies
torch.set_num_threads(2)
@settings(max_examples=5, derandomize=False)
@given(strategies.integers(0, 10**9))
def test_drawn(number): print("drawn", number)
def test_random(seed): print("drawn", seed, random.random(), numpy.random.rand(), torch.rand(()).item())
def test_threads():
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
def test_the_next_ones(): assert torch.get_num_threads() == 1
def test_failing(): raise AssertionError
@pytest.mark.parametrize("case", range(100))
@pytest.mark.drawn(2)
def test_some(case): print("drawn", case)
"""


@pytest.mark.slow
def test_every_run_draws_anew_and_says_what_repeats_it(tmp_path):
    (tmp_path / "test_it.py").write_text(DRAWING)
    runs = [run_pytest(tmp_path, "-s", "-m", "not slow", QUEST_TEST_SEED=seed).stdout for seed in ("", "", "7", "7")]
    drawn = [re.findall(r"drawn .*", run) for run in runs]
    assert all("6 passed" in run and "1 failed" in run for run in runs), runs[0]
    assert drawn[0] != drawn[1]
    assert drawn[2] == drawn[3]
    assert runs[2].count("QUEST_TEST_SEED=7 repeats") == 2
    assert "QUEST_TEST_SEED is 'seven'" in run_pytest(tmp_path, QUEST_TEST_SEED="seven").stderr


@pytest.mark.parametrize(
    ("reason", "no_skip", "outcome"),
    [
        ("why", "0", "skipped"),
        ("why", "1", "failed"),
        ("", "0", "failed"),
        ("unconditional skip", "0", "failed"),
        (f"{versions.PREFIX} it", "1", "skipped"),
    ],
)
def test_skips_need_a_reason_and_can_be_forbidden(reason, no_skip, outcome, monkeypatch):
    monkeypatch.setenv("QUEST_NO_SKIP", no_skip)
    report = SimpleNamespace(outcome="skipped", longrepr=("test_it.py", 1, f"Skipped: {reason}"))
    assert pytest_plugin._examine(report).outcome == outcome


@pytest.mark.parametrize(("imported", "named"), [(0.5, ["b", "c"]), (2.0, ["c"]), (9.0, [])])
def test_a_test_that_works_too_long_fails_the_run(imported, named, monkeypatch):
    monkeypatch.setattr(pytest_plugin, "_seconds_of_import", lambda: imported)
    config = SimpleNamespace(stash={pytest_plugin.OVER: {"b": 6.0, "c": 20.0}})
    session = SimpleNamespace(config=config, exitstatus=0)
    pytest_plugin.pytest_sessionfinish(session)
    assert list(config.stash[pytest_plugin.OVER]) == named
    assert session.exitstatus == bool(named)


def test_the_processes_of_a_command_end_with_it(tmp_path):
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    assert running.run([sys.executable, "-c", script], tmp_path / "log") == 0
    pid = int((tmp_path / "log").read_text().split()[-1])
    stat, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_interrupt_ends_commands_that_run_side_by_side(tmp_path):
    script = f"""
import signal
from pathlib import Path
from devtools import running
def sleep(number):
    for _ in range(2):
        running.run(["bash", "-c", f"echo $$ > {tmp_path}/{{number}}; sleep 60"], Path("{tmp_path}/log"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
running.side_by_side(sleep, range(3))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    started = [tmp_path / "0", tmp_path / "1"]
    while not all(path.exists() and path.read_text() for path in started):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    assert not (tmp_path / "2").exists()
    for path in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def run_pytest(folder, *options, **variables):
    """pytest with the plugin on the files of a folder."""
    command = [sys.executable, "-m", "pytest", "-p", "devtools.pytest_plugin", "--rootdir", ".", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
    return subprocess.run(
        [*command, "."], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
