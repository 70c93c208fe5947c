"""Whole commands: cells run in worker processes, resume, fail and are interrupted."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quest_bench.cli import app_main
from quest_bench.store import load_all
from quest_bench.worker import decode, encode, write_json


def results(out: Path) -> dict[str, float]:
    """Folder -> the time its result was written, to tell what ran again."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}


def test_strict_json_keeps_numbers_that_json_lacks() -> None:
    import numpy as np
    import torch

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


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert decode(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_run_resume_and_extend(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "fake/suite/one", "--attention", "standard,quest", "--out", "out"]
    assert app_main([*command, "--seeds", "0"]) == 0
    assert "2 cells: 1 task × 2 attentions × 1 seed" in capfd.readouterr().out
    first = results(Path("out"))
    assert len(first) == 2
    cell = next(c for c in load_all(Path("out")) if c.cell["attention"] == "quest")
    assert cell.result is not None
    assert cell.result["metrics"] == {"score": 15.0, "limit": math.inf}
    assert cell.result["series"]["loss"][-1] == -math.inf
    assert cell.result["versions"]["fakebench"] == "1.2"
    assert cell.result["threads"] == 1
    log = (cell.folder / "log.txt").read_text()
    assert "printed by the suite" in log
    assert "printed by a child" in log

    assert app_main([*command, "--seeds", "0"]) == 0
    assert "2 finished earlier and are kept, 0 to run" in capfd.readouterr().out
    assert results(Path("out")) == first
    assert app_main([*command, "--seeds", "0-1"]) == 0
    grown = results(Path("out"))
    assert len(grown) == 4
    assert first.items() <= grown.items()
    runs = decode(Path("out/run.json").read_text())["runs"]
    assert [run["seeds"] for run in runs] == ["0", "0-1"]
    assert runs[0]["command"] == "quest bench run fake/suite/one --attention standard,quest --out out --seeds 0"
    assert runs[0]["machine"]["cores"] >= 1
    assert not runs[1]["interrupted"]


def test_a_terminal_sees_bars(fake: Path) -> None:
    command = [sys.executable, "-m", "quest_bench.cli", "run", "fake/suite/one", "--attention", "standard"]
    environment = {**os.environ, "FORCE_COLOR": "1"}  # rich then takes the pipe for a terminal
    done = subprocess.run([*command, "--seeds", "0", "--out", "out"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "all cells" in done.stdout
    assert "1 of 1" in done.stdout


def test_other_option_values_in_the_same_folder_are_refused_but_sweeps_grow(
    fake: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "fake/suite/one", "--attention", "standard", "--seeds", "0", "--out", "out"]
    assert app_main(command) == 0
    capfd.readouterr()
    assert app_main([*command, "--set", "steps=5"]) == 2
    error = capfd.readouterr().err
    assert "out was run with --set steps 3, and this command says 5" in error
    assert "sweep: steps=3,5" in error.replace("--set ", "")
    assert app_main([*command, "--smoke"]) == 2
    assert "--smoke" in capfd.readouterr().err
    assert app_main([*command, "--set", "steps=3,5"]) == 0
    assert len(results(Path("out"))) == 2
    assert app_main([*command, "--set", "steps=5"]) == 0


def test_failed_cells_are_shown_and_tried_again(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [
        "run",
        "fake/suite/one",
        "--attention",
        "standard",
        "--seeds",
        "0-1",
        "--set",
        "mode=flaky",
        "--out",
        "out",
    ]
    assert app_main(command) == 1
    shown = capfd.readouterr().out
    assert "failed cells" in shown
    assert "ValueError: the first try fails" in shown
    assert "log.txt" in shown
    failed = [c for c in load_all(Path("out")) if c.state == "failed"]
    assert [c.cell["seed"] for c in failed] == [1]
    assert "Traceback" in (failed[0].folder / "log.txt").read_text()
    before = results(Path("out"))
    assert app_main(command) == 0
    assert "1 failed earlier and are tried again" in capfd.readouterr().out
    assert before.items() <= results(Path("out")).items()
    assert all(c.state == "done" for c in load_all(Path("out")))


def test_a_worker_that_dies_or_returns_nothing_is_a_failed_cell(fake: Path) -> None:
    command = ["run", "fake/suite/one", "--attention", "standard", "--seeds", "0", "--set", "mode=die,nothing"]
    assert app_main([*command, "--out", "out"]) == 1
    errors = {c.cell["options"]["mode"]: c.error for c in load_all(Path("out"))}
    assert "SIGKILL" in str(errors["die"])
    assert "returned no 'score'" in str(errors["nothing"])
    assert results(Path("out")) == {}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_stopping_leaves_no_half_result_and_no_worker(fake: Path, stop: signal.Signals) -> None:
    # A shell that starts its jobs in the background lets them ignore SIGINT, and what they start inherits that.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; runpy.run_module('quest_bench.cli', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "run", "fake/suite/one", "--attention", "standard,quest"]
    command += ["--seeds", "0-1", "--set", "mode=hang", "--jobs", "2", "--out", "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _until(lambda: len(list(Path("out").glob("cells/*/work/pid"))) == 2 and all(_pids()))
            process.send_signal(stop)
            shown, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert "The same command resumes" in shown
    _until(lambda: not any(map(_alive, _pids())))
    assert list(Path("out").glob("cells/*/result.json")) == []
    assert list(Path("out").glob("cells/*/*.tmp")) == []
    assert {c.state for c in load_all(Path("out"))} == {"unfinished"}
    assert decode(Path("out/run.json").read_text())["runs"][0]["interrupted"]
    # nothing is finished, so other settings are welcome
    assert app_main(["run", "fake/suite/one", "--attention", "standard", "--seeds", "0", "--out", "out"]) == 0


def _pids() -> list[int]:
    return [int(path.read_text() or 0) for path in Path("out").glob("cells/*/work/pid")]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _until(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_a_second_run_keeps_out_of_the_folder(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quest_bench.store import locked

    with locked(Path("out")):
        assert app_main(["run", "fake/suite", "--out", "out"]) == 2
    assert "another `quest bench run` is writing to out" in capfd.readouterr().err
