"""quest run: any command, with the plugins installed in every Python process below it and nothing else changed."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from distributions import ADAPTER as MINIMAL
from distributions import write_distribution

from quest_core import cli
from quest_core.cli.start import command_of
from quest_core.hosts import launch, plugins

ROOT = Path(__file__).resolve().parents[1]

ADAPTER = "import toyhost" + MINIMAL.format(name="toy").replace("pass", 'toyhost.accepts.append("attention")')
TOY = plugins.Plugin("toy", "torch", "1.0", ("json",), "quest_toy.adapter:HostAdapter")
LOST = plugins.Plugin("lost", "quest-lost", "1.0", ("no_such_host",), "quest_lost.adapter:HostAdapter")


def parse(arguments):
    """What `quest run` understands of its arguments."""
    return cli.parsers({})[0].parse_args(["run", *arguments])


@pytest.fixture
def run(tmp_path):
    """run(*arguments) is `quest run ...` in a folder with the framework toyhost and an installed plugin for it."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    files = {"toyhost.py": "accepts = []\n", "quest_toy/__init__.py": "", "quest_toy/adapter.py": ADAPTER}
    write_distribution(site, "quest-toy", files, {"quest.adapters": {"toyhost": "quest_toy.adapter:HostAdapter"}})
    toy = plugins.Plugin("toy", "quest-toy", "1.2", ("toyhost",), "quest_toy.adapter:HostAdapter")
    base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(*arguments, by_command=False):
        command, env = (
            launch.complete(command_of(parse(arguments))),
            launch.environment([toy], "--host" in arguments, base),
        )
        if by_command:
            code = "import sys; from quest_core.cli import main; sys.exit(main())"
            command, env = [sys.executable, "-c", code, "run", *arguments], base
        return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)

    return start


def script(tmp_path, text, name="work/train.py"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


REPORT = """
    import json, os, sys
    import toyhost
    print(json.dumps([__name__, sys.argv, os.path.basename(sys.path[0]), toyhost.accepts, __spec__ is None]))
"""


def test_a_script_runs_as_it_would_alone_with_the_plugin_installed(run, tmp_path):
    script(tmp_path, REPORT, "work/jobs/train.py")
    done = run("--host", "toy", "--", "python", "-u", "jobs/train.py", "--help", "--epochs", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [
        "__main__",
        ["jobs/train.py", "--help", "--epochs", "3"],
        "jobs",
        ["attention"],
        True,
    ]


@pytest.mark.slow
def test_child_processes_are_served_whoever_starts_them(run, tmp_path):
    script(
        tmp_path,
        """
        import multiprocessing, subprocess, sys

        def work(queue):
            import toyhost
            queue.put(toyhost.accepts)

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            child = context.Process(target=work, args=(queue,))
            child.start(); print(queue.get()); child.join()
            subprocess.run([sys.executable, "-c", "import toyhost; print(toyhost.accepts)"], check=True)
        """,
    )
    (tmp_path / "work" / "train.sh").write_text(f"{sys.executable} train.py\n")
    done = run("--", "sh", "train.sh")
    assert done.stdout == "['attention']\n" * 2, done.stderr


@pytest.mark.slow
def test_the_exit_status_is_the_commands(run, tmp_path):
    script(tmp_path, "import toyhost; print(toyhost.accepts); raise SystemExit(7)")
    done = run("train.py", by_command=True)
    assert (done.returncode, done.stdout) == (7, "['attention']\n")


def test_nothing_is_imported_before_the_script_asks(run, tmp_path):
    script(tmp_path, "import sys; print({'torch', 'quest_core', 'quest_toy', 'toyhost'} & set(sys.modules))")
    assert run("train.py").stdout == "set()\n"


def test_a_sitecustomize_of_the_users_runs_too(run, tmp_path):
    script(tmp_path, "print('hello')", "site/sitecustomize.py")
    script(tmp_path, "import sys; print(any('launched' in entry for entry in sys.path))")
    assert run("train.py").stdout.endswith("hello\nFalse\n")


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_a_broken_plugin_says_one_line_and_stops_only_a_command_that_requires_it(run, tmp_path, required):
    script(tmp_path, ADAPTER.replace('toyhost.accepts.append("attention")', "1 / 0"), "site/quest_toy/adapter.py")
    script(tmp_path, "import toyhost; print(toyhost.accepts)")
    done = run("--host", "toy", "train.py") if required else run("train.py")
    said = f"the plugin 'toy' cannot be installed in {sys.executable}: ZeroDivisionError('division by zero')"
    assert (done.returncode, done.stdout) == ((1, "") if required else (0, "[]\n"))
    assert f"RuntimeError: quest run: {said}" in done.stderr if required else done.stderr == f"quest run: {said}\n"


@pytest.mark.parametrize(
    ("argv", "hosts", "words"),
    [
        ("train.py --host x", None, [sys.executable, "train.py", "--host", "x"]),
        ("-- python train.py -m x", None, [sys.executable, "train.py", "-m", "x"]),
        ("-- python -um pkg x", None, [sys.executable, "-um", "pkg", "x"]),
        ("--host a --host b -m pkg -h", ["a", "b"], [sys.executable, "-m", "pkg", "-h"]),
        ("--host=a sh train.sh", ["a"], [shutil.which("sh"), "train.sh"]),
    ],
)
def test_the_command_begins_where_our_options_end(argv, hosts, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    given = parse(argv.split())
    assert given.host == hosts
    assert launch.complete(command_of(given)) == words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-- no-such-program x", "no program 'no-such-program'; the command was: no-such-program x"),
        ("--host toys -- x.py", "no plugin for 'toys' is installed; did you mean 'toy'? Choose from: lost, toy"),
        ("--host lost x.py", "plugin quest-lost 1.0 cannot be used: no_such_host is not installed; fix: pip install"),
    ],
)
def test_mistakes_are_named_before_anything_starts(arguments, said, monkeypatch, capsys):
    for module in (launch, plugins):
        monkeypatch.setattr(module, "plugins", lambda: [TOY, LOST])
    assert cli.main(["run", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_plugin_without_its_host_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(launch, "plugins", lambda: [TOY, LOST])
    assert launch.choose_plugins(None) == [TOY]
    said = "quest run: plugin quest-lost 1.0 is left out: no_such_host is not installed; fix: pip install"
    assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(launch, "plugins", lambda: [LOST])
    assert cli.main(["run", "train.py"]) == 2
    assert "no plugin can be used here: plugin quest-lost 1.0 is left out" in capsys.readouterr().err
    monkeypatch.setattr(launch, "plugins", list)
    assert cli.main(["run", "train.py"]) == 2
    assert "none is installed; fix: pip install 'quest-<host>[host]'" in capsys.readouterr().err


def test_another_python_without_quest_says_so(run, tmp_path):
    script(tmp_path, "import sys; sys.modules['quest_core'] = None\nimport toyhost")
    done = run("--host", "toy", "train.py")
    assert done.returncode == 1
    assert f"the plugin 'toy' cannot be installed in {sys.executable}: ModuleNotFoundError" in done.stderr


def test_every_module_of_a_host_is_waited_for():
    both = plugins.Plugin("p", "quest-p", "1.0", ("from_the_index", "lying_here"), "quest_p.adapter:Adapter")
    assert launch.environment([both], False, {})[launch.PAIRS] == "p=from_the_index,p=lying_here"
    assert launch.environment([TOY], True, {})[launch.PAIRS] == "toy=json!"


def test_environments_do_not_pile_up():
    once = launch.environment([], False, {"PYTHONPATH": "/somewhere"})
    assert launch.environment([], False, once) == once
    assert once["PYTHONPATH"].split(os.pathsep)[1:] == ["/somewhere"]
