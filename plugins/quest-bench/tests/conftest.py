"""A small plugin with one suite, installed by writing its files."""

import sys

import pytest

from quest_bench import cli, store, worker
from quest_bench.run import Outcome, Runner

SUITES = """
SUITES = {
    "fake/suite": {
        "summary": "numbers made from the seed",
        "tasks": ["one", "two"],
        "tasks_from_data": "fakebench.listing:tasks",
        "data": "a folder with NAME.txt",
        "metric": "score",
        "unit": "%",
        "higher_is_better": True,
        "paper": {
            "source": "A paper", "table": "table 1", "protocol": "one run", "difference": "none", "spread": "range",
            "values": {
                "score": {"one": {"standard": {"value": 10.5, "spread": 0.25}, "quest": {"value": 20, "spread": None}}},
                "cost": {"one": {"quest": {"value": 7.5, "spread": None}}},
            },
        },
        "options": [
            {"name": "mode", "kind": "str", "default": "ok", "doc": "what happens",
             "choices": ("ok", "fail", "nothing", "text", "hang", "die", "flaky", "slow", "data", "memory", "lost")},
            {"name": "scale", "kind": "float", "default": 1.0, "doc": "factor", "minimum": 0.0, "nullable": True},
            {"name": "steps", "kind": "int", "default": 3, "doc": "length of the series", "minimum": 1},
            {"name": "fast", "kind": "bool", "default": False, "doc": "a switch"},
        ],
    },
}
"""

LISTING = """
def tasks(data):
    # each NAME.txt is a task; an empty one is invalid
    if (data / "needs-more").exists():
        from quest_core.errors import PluginError
        raise PluginError("the reader needs numpoems; pip install numpoems")
    return {
        path.stem: {"files": [str(path)], "problem": None if path.read_text() else f"{path} is empty"}
        for path in data.glob("*.txt")
    }
"""

TASKS = """
import math
import os
import signal
import time

from quest_suites.contract import Result


def run(cell, progress):
    print("printed by the suite", flush=True)
    os.system("echo printed by a child")
    mode = cell.options["mode"]
    (cell.workdir / "pid").write_text(str(os.getpid()))
    if mode == "flaky":
        tried = cell.workdir / "tried"
        if cell.seed == 1 and not tried.exists():
            tried.touch()
            raise ValueError("\\nthe first try fails")
    if mode == "fail":
        raise ValueError(f"seed {cell.seed} is refused")
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "memory":
        bytearray(2**62)
    if mode == "hang":
        time.sleep(120)
    if mode == "slow":
        time.sleep(0.4)
    if mode == "data":
        for name in ("raw", "processed"):
            (cell.data / name).mkdir(exist_ok=True)
    score = 10.0 * (cell.options["scale"] or 0) + cell.seed + (5 + 0.1 * cell.seed) * (cell.attention == "quest")
    for step in range(cell.options["steps"]):
        progress((step + 1) / cell.options["steps"], f"step {step}")
    if mode == "text":
        score = f"about {score}"
    if "COUNT_RUNS" in os.environ:
        with open(os.environ["COUNT_RUNS"], "a") as file:
            file.write(f"{cell.workdir.parent.name}\\n")
    metrics = {} if mode == "nothing" else {"score": score, "limit": math.inf}
    loss = [1.0 / (step + 1) for step in range(cell.options["steps"])] + [-math.inf]
    series = {"train_loss" if mode == "lost" else "loss": loss}
    return Result(metrics, series)
"""


@pytest.fixture
def installed(tmp_path):
    """A function that makes a package in `site` a distribution with entry points."""

    def make(name, version, points):
        about = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text(points)

    return make


@pytest.fixture
def fake(tmp_path, installed, monkeypatch):
    """Installs the plugin for this process and its children; the folder to work in."""
    site = tmp_path / "site"
    (site / "fakebench").mkdir(parents=True)
    for name, text in {"__init__": "", "suites": SUITES, "listing": LISTING, "tasks": TASKS}.items():
        (site / "fakebench" / f"{name}.py").write_text(text)
    points = "[quest.suites]\nfake = fakebench.suites:SUITES\n[quest.benchmarks]\nfake/suite = fakebench.tasks:run\n"
    installed("fakebench", "1.2", points)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakebench"]:  # of an earlier test
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.setattr("quest_bench.cli.cores", lambda: 1)  # each worker imports torch; tests of many say --jobs
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def describe(fake):
    """A function that adds to what `fake/suite` says of itself."""
    suites = fake.parent / "site" / "fakebench" / "suites.py"

    def add(more):
        suites.write_text(suites.read_text().replace('"unit": "%",', f'"unit": "%", {more},'))
        sys.modules.pop("fakebench.suites", None)

    return add


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Keep what the commands print in one line each, whatever COLUMNS was when the console was made."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(cli.console, "width", 240)


@pytest.fixture
def inside(fake, monkeypatch):
    """As `fake`, with cells that run in this process, for tests in which a process each is not the point."""

    def run(runner, cells):
        outcome = Outcome()
        for cell in cells:
            if store.state(cell) == "done":
                continue
            folder = cell.workdir.parent
            (folder / "error.txt").unlink(missing_ok=True)
            try:
                worker.run(folder / "cell.json", lambda message: None)
                outcome.done.append(cell)
            except Exception as error:
                store.fail(folder, worker.describe_error(error))
                outcome.failed.append(cell)
        return outcome

    monkeypatch.setattr(Runner, "run", run)
    return fake


@pytest.fixture
def bench(capfd):
    """A function that runs `quest bench` with words, and returns what it printed; its errors if the status is 2."""

    def run(*words, status=0):
        capfd.readouterr()
        assert cli.app_main([*words]) == status
        out, errors = capfd.readouterr()
        return errors if status == 2 else out

    return run
