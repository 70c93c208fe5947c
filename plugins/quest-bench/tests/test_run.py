"""Whole commands: cells run in worker processes, resume, fail and are interrupted."""

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_report import write_results

from quest_bench import worker
from quest_bench.cli import app_main
from quest_bench.plan import portable
from quest_bench.run import Outcome, Runner
from quest_bench.store import load_all
from quest_bench.worker import _number, decode, encode, write_json
from quest_core.registry import packages, temporary

RUN = shlex.split("run fake/suite/one --attention standard --seeds 0 --out out")
"""A command of one cell; of an option that is given again, the last one counts."""


def results(out):
    """Folder -> the time its result was written, which shows what ran again."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}


def test_strict_json_keeps_numbers_that_json_lacks():
    value = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": {"c": None, "d": "NaN", "e": True, "f": 3}}
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(text)
    assert math.isnan(back["a"][0])
    assert back["a"][1:] == value["a"][1:]
    assert back["b"] == value["b"]
    arrays = {"numpy": np.float32(0.5), "many": np.arange(2), "torch": torch.tensor([1.0, math.nan])}
    assert encode(arrays) == {"numpy": 0.5, "many": [0, 1], "torch": [1.0, {"$float": "nan"}]}
    with pytest.raises(TypeError, match=r"value\.x\[0\] is object"):
        encode({"x": [object()]})


def test_metrics_and_series_are_numbers():
    for good in (3, np.float32(3), torch.tensor([[3.0]], requires_grad=True), np.array([3])):
        assert _number("metric 'm'", good) == 3.0
    for bad in ("a text", [1.0], None, 1j, torch.tensor([1.0, 2.0]), np.ones(2)):
        with pytest.raises(TypeError, match="metric 'm' is .*, which is not a number"):
            _number("metric 'm'", bad)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert decode(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_run_resume_and_extend(fake, bench):
    command = ["run", "fake/suite/one", "--attention", "quest", "--out", "out", "--seeds"]
    assert "1 cell: 1 task × 1 attention × 1 seed" in bench(*command, "0")
    first = results(Path("out"))
    (cell,) = load_all(Path("out"))
    assert cell.result["metrics"] == {"score": 15.0, "limit": math.inf}
    assert cell.result["series"]["loss"][-1] == -math.inf
    assert cell.result["versions"]["fakebench"] == "1.2"
    assert cell.result["threads"] == 1
    log = (cell.folder / "log.txt").read_text()
    assert "printed by the suite" in log
    assert "printed by a child" in log

    assert "1 finished earlier and are kept, 0 to run" in bench(*command, "0")
    assert results(Path("out")) == first
    bench(*command, "0-1")
    grown = results(Path("out"))
    assert len(grown) == 2
    assert first.items() <= grown.items()
    runs = decode(Path("out/run.json").read_text())["runs"]
    assert [run["seeds"] for run in runs] == ["0", "0-1"]
    assert runs[0]["command"] == "quest bench run fake/suite/one --attention quest --out out --seeds 0"
    assert runs[0]["machine"]["cores"] >= 1
    assert not runs[1]["interrupted"]


SCORE = """
from quest_core import Score, register

@register("cubed", source="a test")
class Cubed(Score):
    "q · k³."

    causal = cross = cached = True
    reads = ()

    def key(self, k):
        return k**3
"""


def test_the_example_of_a_suite_runs_on_files(inside, installed, bench, tmp_path):
    example = Path(__file__).parents[3] / "examples" / "own_suite"
    shutil.copytree(example / "own_suite", tmp_path / "site" / "own_suite")
    tables = (example / "pyproject.toml").read_text().split("[project.entry-points.")[1:]
    installed("own-suite", "0.1", "".join(f"[{x.partition('[tool')[0]}".replace('"', "") for x in tables))
    command = ["run", "own/csv", "--attention", "standard,quest", "--seeds", "0", "--smoke", "--out", "out"]
    bench(*command, status=2)  # without data
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.csv", "test.csv"):
        (data / name).write_text("".join(f"{i % 2},{i},{-i},{i % 3},0.5\n" for i in range(40)))
    bench(*command, "--data", str(data))
    assert [0 <= cell.result["metrics"]["accuracy"] <= 100 for cell in load_all(Path("out"))] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["quest_power/__init__.py", "quest_power/later.py", "quest_power.py"])
def test_a_changed_mechanism_of_a_checkout_is_another_commit(fake, installed, bench, tmp_path, file):
    """It is measured like ours. The change may be in a file that git does not know yet."""
    site = tmp_path / "site"
    begun = site / (file if file.endswith("power.py") else "quest_power/__init__.py")
    begun.parent.mkdir(exist_ok=True)
    begun.write_text("")
    for words in (["init"], ["add", str(begun)], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a"]):
        subprocess.run(["git", "-C", str(site), *words], check=True, capture_output=True)
    (first,) = worker.commits(["quest_power"]).values()
    assert len(first) == 40
    (begun.parent / "__pycache__").mkdir(exist_ok=True)
    (begun.parent / "__pycache__" / "later.pyc").write_text("1")
    assert worker.commits(["quest_power"]) == {"quest-power": first}
    seen = {first}
    for text in (SCORE, SCORE.replace("k**3", "k**5")):
        (site / file).write_text(text)
        (now,) = worker.commits(["quest_power"]).values()
        seen.add(now)
    assert len(seen) == 3

    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    installed("quest-power", "3.4", f"[quest.attention]\ncubed = {module}\n")
    with temporary():
        packages.cache_clear()
        command = [*RUN, "--attention", "standard,cubed"]
        bench(*command)
        standard, cubed = sorted(load_all(Path("out")), key=lambda cell: cell.spec["attention"] == "cubed")
        assert (cubed.result["commits"]["quest-power"], cubed.result["versions"]["quest-power"]) == (now, "3.4")
        assert "quest-power" not in standard.result["versions"]
        (site / file).write_text(SCORE)
        bench(*command, "--seeds", "0-1")
    for name in [name for name in sys.modules if name.startswith("quest_power")]:
        del sys.modules[name]
    bench("report", "out")
    assert "> Mixed commit of quest-power: " in Path("out/report.md").read_text()


@pytest.mark.slow
def test_a_terminal_sees_bars(fake):
    command = [sys.executable, "-m", "quest_bench.cli", *RUN]
    environment = {**os.environ, "FORCE_COLOR": "1"}  # rich then takes the pipe for a terminal
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "all cells" in done.stdout
    assert "1 of 1" in done.stdout


def test_other_option_values_in_the_same_folder_are_refused_but_sweeps_grow(inside, bench):
    bench(*RUN)
    error = bench(*RUN, "--set", "steps=5", status=2)
    assert "out was run with --set steps 3, and this command says 5" in error
    assert "sweep: steps=3,5" in error.replace("--set ", "")
    assert "--smoke" in bench(*RUN, "--smoke", status=2)
    bench(*RUN, "--set", "steps=3,5")
    assert len(results(Path("out"))) == 2
    bench(*RUN, "--set", "steps=5")


def test_failed_cells_are_shown_and_tried_again(inside, bench):
    command = [*RUN, "--seeds", "0-1", "--set", "mode=flaky"]
    assert "1 failed: ValueError: the first try fails  (first: out/cells/" in bench(*command, status=1)
    failed = [c for c in load_all(Path("out")) if c.state == "failed"]
    assert [c.spec["seed"] for c in failed] == [1]
    before = results(Path("out"))
    assert "1 failed earlier and are tried again" in bench(*command)
    assert before.items() <= results(Path("out")).items()
    cells = {cell.spec["seed"]: cell for cell in load_all(Path("out"))}
    assert {cell.state for cell in cells.values()} == {"done"}
    assert cells[0].result["seconds"] > 0
    assert math.isnan(cells[1].result["seconds"])  # those of its last part would pass for a fast cell
    bench("report", "out")
    bench("compare", "out", "out")


def test_a_worker_that_dies_is_a_failed_cell(fake, bench):
    bench(*RUN, "--set", "mode=die", status=1)
    (cell,) = load_all(Path("out"))
    assert "SIGKILL" in str(cell.error)
    assert results(Path("out")) == {}


def test_a_training_whose_loss_ends_on_no_number_has_diverged(inside, bench):
    """A model of NaN still guesses a class, so its accuracy is a number."""
    bench(*RUN, "--set", "mode=lost")
    (cell,) = load_all(Path("out"))
    assert math.isnan(cell.result["metrics"]["score"])


def test_a_cell_that_returns_no_number_or_has_no_memory_has_failed(inside, bench):
    bench(*RUN, "--set", "mode=nothing,text,memory", status=1)
    errors = {c.spec["options"]["mode"]: c.error for c in load_all(Path("out"))}
    assert "returned no 'score'" in str(errors["nothing"])
    assert errors["text"] == "TypeError: metric 'score' is 'about 10.0', which is not a number\n"
    assert errors["memory"] == "MemoryError; the cell ran out of memory: try fewer --jobs, or a smaller batch\n"
    assert results(Path("out")) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "status", "words"),
    [
        (signal.SIGINT, 130, "The same command resumes"),
        (signal.SIGTERM, 128 + signal.SIGTERM, "stopped by SIGTERM; 0 cells finished"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_stopping_leaves_no_half_result_and_no_worker(fake, stop, status, words, bench):
    # A shell that starts its jobs in the background lets them ignore SIGINT, and what they start inherits that.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; runpy.run_module('quest_bench.cli', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *RUN, "--attention", "standard,quest", "--seeds", "0-1"]
    command += ["--set", "mode=hang", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _until(lambda: len(list(Path("out").glob("cells/*/work/pid"))) == 2 and all(_pids()))
            process.send_signal(stop)
            shown, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert words in shown
    assert "The same command resumes" in shown or stop == signal.SIGKILL
    _until(lambda: not any(map(_alive, _pids())))
    assert list(Path("out").glob("cells/*/result.json")) == []
    assert list(Path("out").glob("cells/*/*.tmp")) == []
    assert "0 done, 0 running, 0 failed, 4 unfinished" in bench("status", "out")  # also those that never began
    assert decode(Path("out/run.json").read_text())["runs"][0]["interrupted"]
    bench(*RUN)  # nothing is finished, so other settings are welcome


def _pids():
    return [int(path.read_text() or 0) for path in Path("out").glob("cells/*/work/pid")]


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
def test_two_orchestrators_with_random_kills_finish_every_cell_once(fake):
    """Orchestrators, workers and cells are killed at random and started again; no file is torn, no cell is lost."""
    command = [sys.executable, "-m", "quest_bench.cli", "run", "fake/suite", "--attention", "standard,quest"]
    command += ["--seeds", "0-5", "--set", "mode=slow", "--jobs", "2", "--out", "out"]
    environment = {**os.environ, "COUNT_RUNS": str(fake / "count.txt")}

    def start():
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

    running = [start(), start()]
    try:
        for _ in range(12):
            time.sleep(random.uniform(0.5, 2))
            pids = _tree(random.choice(running).pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)
            running = [one if one.poll() is None else start() for one in running]
        assert len(results(Path("out"))) < 24, "the last kills met no work"
        for one in running:
            one.wait(timeout=400)
        assert subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode == 0
    finally:
        for one in running:
            one.kill()
    cells = load_all(Path("out"))
    assert len(cells) == 24
    assert {cell.state for cell in cells} == {"done"}
    assert list(Path("out").glob("**/*.torn")) == []
    finished = Path("count.txt").read_text().split()
    assert len(finished) == len(set(finished)), "a cell finished twice"
    decode(Path("out/run.json").read_text())


def _tree(root):
    """A process and its descendants, also those in sessions of their own."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            parents[pid] = int(rest[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def test_the_command_that_resumes_names_the_same_folder(fake, monkeypatch, bench):
    """A shell leaves a quoted ~ as it is, so the printed command has the real path and the recorded one is expanded."""
    monkeypatch.setenv("HOME", str(fake))
    monkeypatch.setattr(Runner, "run", lambda *_: Outcome(stopped=signal.SIGTERM))
    out = fake / "my runs" / "x"
    command = ["run", "fake/suite/one", "--attention", "standard", "--seeds", "0"]
    shown = bench(*command, "--out", str(out), status=128 + signal.SIGTERM).splitlines()
    assert shlex.split(shown[-1]) == ["quest", "bench", *command, "--out", str(out)]
    recorded = decode((out / "run.json").read_text())["runs"][0]["command"]
    assert recorded == shlex.join(["quest", "bench", *command, "--out", "~/my runs/x"])
    bench(*shlex.split(recorded)[2:], status=128 + signal.SIGTERM)
    assert len(decode((out / "run.json").read_text())["runs"]) == 2
    assert f"{fake}/none does not exist" in bench("report", "~/none", status=2)
    assert portable([f"--python=tsai={fake}/python", f"{fake}/a=b"]) == "'--python=tsai=~/python' '~/a=b'"


def test_names_of_any_script_and_length_are_cells(inside, bench):
    (inside / "data").mkdir()
    name = "日本語の学習データ" * 8
    (inside / "data" / f"{name}.txt").write_text("3")
    bench("run", f"fake/suite/{name}", *RUN[2:], "--data", "data")
    assert {cell.spec["task"] for cell in load_all(Path("out"))} == {name}
    bench("report", "out")
    assert name in Path("out/report.md").read_text()


def test_a_hung_cell_times_out(fake, bench):
    """The time counts from the start of its process, so that an import may hang too."""
    bench(*RUN, "--seeds", "0-1", "--set", "mode=hang", "--timeout", "1", status=1)
    states = [(cell.state, cell.error) for cell in load_all(Path("out"))]
    assert states == 2 * [("failed", "timed out after 1 s (--timeout)\n")]


@pytest.mark.slow
def test_a_good_cell_finishes_beside_a_hung_one(fake, bench):
    bench(*RUN, "--set", "mode=hang,ok", "--jobs", "2", "--timeout", "30", status=1)
    states = {cell.spec["options"]["mode"]: (cell.state, cell.error) for cell in load_all(Path("out"))}
    assert states == {"hang": ("failed", "timed out after 30 s (--timeout)\n"), "ok": ("done", None)}


def test_a_torn_or_foreign_file_is_named_and_runs_again_once_it_is_deleted(inside, bench):
    command = [*RUN, "--seeds", "0-1"]
    bench(*command)
    torn = next(Path("out").glob("cells/*/result.json"))
    torn.write_text(torn.read_text()[:50])
    shown = bench("status", "out")
    assert "1 done, 0 running, 1 failed" in shown
    assert "1 failed: result.json is torn" in shown
    torn.write_text('{"series": {}}')
    bench("report", "out")
    assert "result.json is not a file of quest-bench, because it lacks metrics, device; delete it" in (
        Path("out/report.md").read_text()
    )
    torn.unlink()
    bench(*command)
    assert all(c.state == "done" for c in load_all(Path("out")))
    cell = torn.with_name("cell.json")
    cell.write_text(cell.read_text()[:50])
    assert f"error: {cell} is torn" in bench("status", "out", status=2)
    cell.unlink()
    bench(*command)
    assert len(load_all(Path("out"))) == 2
    bench("report", "out")
    run, table = Path("out/run.json"), Path("out/results.parquet")
    run.write_text("{}")
    said = "error: out/run.json is not a file of quest-bench, because it lacks runs"
    assert said in bench("report", "out", status=2)
    run.write_text('{"runs": [')
    error = bench("report", "out", status=2)
    assert error.startswith("error: out/run.json is torn")
    assert len(error.strip().splitlines()) == 1
    run.unlink()
    shutil.rmtree("out/cells")
    table.write_bytes(table.read_bytes()[:-100])
    assert bench("report", "out", status=2).startswith("error: out/results.parquet cannot be read")


def test_a_cell_that_another_command_runs_is_left_to_it(fake, bench):
    write_results(Path("out"), [], {"standard": [50.0, 52.0]})
    (path,) = Path("out").glob("cells/*seed0*/result.json")
    path.unlink()
    with path.with_name("claim").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert "1 cells are left to another command" in bench(*RUN, "--seeds", "0-1")
        assert "1 done, 1 running, 0 failed, 0 unfinished" in bench("status", "out")
    assert not path.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device; free some space"),
        (errno.EROFS, "Read-only file system; choose a writable folder"),
    ],
)
def test_a_disk_that_cannot_be_written_is_one_line_with_the_file_and_keeps_the_old_ones(
    inside, monkeypatch, bench, code, words
):
    def full(*_):
        raise OSError(code, os.strerror(code))

    bench(*RUN)
    bench("report", "out")
    before = {path: path.read_bytes() for path in Path("out").glob("**/*") if path.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    for command, name in ((["report", "out"], ".png"), ([*RUN, "--seeds", "0-1"], "out/run.json")):
        error = bench(*command, status=2)
        assert f"{name}: {words}, then run the same command again" in error
        assert len(error.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in before} == before
    assert Path("out/results.parquet") in before


@pytest.mark.slow
def test_a_full_disk_in_a_worker_fails_the_cell_and_resumes(fake, bench):
    """Neither the result nor the log can be written, as on a disk that is full."""
    tasks = fake.parent / "site" / "fakebench" / "tasks.py"
    good = tasks.read_text()
    tasks.write_text("import os, errno, traceback\n\ndef full(*_):\n    raise OSError(errno.ENOSPC, 'No space left "
                     f"on device')\n\nos.fsync = traceback.print_exc = full\n{good}")  # fmt: skip
    bench(*RUN, status=1)
    (cell,) = load_all(Path("out"))
    assert "No space left on device; free some space" in cell.error
    tasks.write_text(good)
    bench(*RUN)


def test_a_cell_that_another_commit_began_starts_again(inside, bench):
    command = [*RUN, "--set", "mode=flaky,fail"]
    bench(*command, status=1)
    cell = next(path.parent for path in Path("out").glob("cells/*/error.txt"))
    (cell / "work" / "half").touch()
    begun = decode((cell / "origin.json").read_text())
    bench(*command, status=1)
    assert (cell / "work" / "half").is_file()
    for other in (json.dumps({**begun, "versions": {"fakebench": "1.1"}}), '{"versions"'):
        (cell / "work" / "half").touch()
        (cell / "origin.json").write_text(other)
        assert "another commit or version began this cell" in bench(*command, status=1)
        assert not (cell / "work" / "half").exists()


def test_data_counts_by_its_content(inside, bench):
    for name in ("a", "b"):
        (inside / name).mkdir()
        (inside / name / "three.txt").write_text("3")
    command = ["run", "fake/suite", *RUN[2:], "--set", "mode=data", "--data"]
    bench(*command, "a")
    assert "1 finished earlier and are kept, 0 to run" in bench(*command, "b")
    (inside / "b" / "three.txt").write_text("33")
    assert "out holds cells of task 'three' with data of content" in bench(*command, "b", status=2)


def test_merge_status_and_compare(inside, bench):
    for out, seeds in (("a", "0-1"), ("b", "1-2")):
        bench(*RUN, "--attention", "standard,quest", "--seeds", seeds, "--out", out)
    assert "c: 6 cells copied, 0 were there" in bench("merge", "a", "b", "--out", "c")
    assert "c: 0 cells copied, 6 were there" in bench("merge", "a", "--out", "c")
    assert "6 done, 0 running, 0 failed, 0 unfinished" in bench("status", "c")
    assert "equal to a on every seed" in bench("compare", "a", "c")
    path = next(Path("b").glob("cells/*seed1*/result.json"))
    found = decode(path.read_text())
    found["metrics"]["score"] += 1
    write_json(path, found)
    assert "are the same cell with different results" in bench("merge", "a", "b", "--out", "d", status=2)
    for path in Path("b").glob("cells/*/cell.json"):
        write_json(path, {**decode(path.read_text()), "smoke": True})
    assert "is a smoke run" in bench("merge", "a", "b", "--out", "e", status=2)
    assert not Path("e/cells").exists()


def test_merging_mixes_commits_visibly_and_leaves_no_half_cell(inside, monkeypatch, bench):
    for out, attention in (("a", "standard"), ("b", "quest")):
        bench(*RUN, "--attention", attention, "--seeds", "0-1", "--out", out)
    for path in Path("b").glob("cells/*/result.json"):
        write_json(path, {**decode(path.read_text()), "commits": {"quest-core": "b" * 40}})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: os._exit(3))
        child = os.fork()
        if child == 0:
            app_main(["merge", "a", "b", "--out", "c"])
    os.waitpid(child, 0)
    assert load_all(Path("c")) == []
    bench("merge", "a", "b", "--out", "c")
    assert len(load_all(Path("c"))) == 4
    bench("report", "c")
    text = Path("c/report.md").read_text()
    assert "> Mixed commit of quest-core: " in text
    assert "bbbbbbbbbbbb (quest)" in text
    for path in Path("c").glob("cells/*-quest-*/result.json"):
        write_json(path, {**decode(path.read_text()), "commits": {}, "device": "a GPU"})
    bench("report", "c")
    text = Path("c/report.md").read_text()
    assert "unknown (quest)" in text  # a wheel
    assert "> Mixed device: a GPU (quest); cpu (standard). " in text


@pytest.mark.slow
def test_a_group_can_resume_what_one_of_it_began(fake, bench):
    """The files of a cell are as open as the umask lets them be."""
    before = os.umask(0o002)
    try:
        bench(*RUN)
    finally:
        os.umask(before)
    assert [path for path in Path("out").rglob("*") if not path.stat().st_mode & 0o020] == []


def test_kv_heads_are_checked_before_a_worker_starts(describe, bench):
    describe('"heads": 8')
    for wrong in ("kv_heads=5", "ratio=3"):
        said = f"{wrong.replace('=', ' is ')}, which does not divide the 8 heads"
        assert said in bench(*RUN, "--attention", f"quest+gqa({wrong})", status=2)
    assert not Path("out").exists()


def test_a_print_before_the_cell_starts_is_no_message(fake, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('a banner'); print(5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert app_main(RUN) == 0
