"""Jobs of submitit's local executor share one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from quest_bench.cli import app_main
from quest_bench.cluster import Orchestrate, strip, submit
from quest_bench.store import load_all

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'quest-bench[slurm]'")


@pytest.mark.slow
def test_two_local_jobs_run_all_cells(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "fake/suite", "--attention", "standard,quest", "--seeds", "0-1", "--set", "mode=slow"]
    command += ["--jobs", "1", "--out", "out", "--cluster", "local", "--orchestrators", "2"]
    assert app_main([*command, "--cluster-set=timeout_min=5"]) == 0
    assert "next: quest bench status out" in capfd.readouterr().out
    end = time.monotonic() + 150
    while not (len(cells := load_all(Path("out"))) == 8 and all(cell.state == "done" for cell in cells)):
        assert time.monotonic() < end, [path.read_text() for path in Path("out/cluster").glob("*.err")]
        time.sleep(0.5)


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_resumes(fake: Path) -> None:
    command = ["run", "fake/suite/one", "--attention", "standard", "--seeds", "0-9", "--set", "mode=slow"]
    (job,) = submit([*command, "--jobs", "1", "--out", "out"], Path("out"), "local", 1, ["timeout_min=60"])

    def done() -> int:
        return len(list(Path("out").glob("cells/*/result.json")))

    end = time.monotonic() + 150
    while not 0 < done() < 10:
        assert time.monotonic() < end
        time.sleep(0.05)
    (task,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)  # as Slurm does before the time limit
    while done() < 10:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert "Requeued job" in job.paths.stdout.read_text()
    assert job.result() == 0


def test_a_job_that_slurm_preempts_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("sys.executable", "true")
    assert Orchestrate(["run"])() == 0
    assert waited == []
    done = subprocess.CompletedProcess([], 128 + signal.SIGTERM)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert Orchestrate(["run"])() == 143
    assert len(waited) == 1


def test_a_job_does_not_submit_again() -> None:
    given = ["run", "a", "--cluster", "slurm", "--seeds", "0", "--orchestrators=3", "--cluster-set", "x=1"]
    assert strip(given) == ["run", "a", "--seeds", "0"]
    again = Orchestrate(["run"]).checkpoint()
    assert isinstance(again.function, Orchestrate)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "slurn"], "did you mean 'slurm'"),
        (["--cluster", "slurm"], "--cluster slurm: submitit refused"),
        (["--cluster", "local", "--cluster-set", "partition"], "is not key=value"),
        (["--cluster", "local", "--cluster-set", "no_such_key=1"], "--cluster local: submitit refused"),
    ],
)
def test_wrong_clusters(fake: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert app_main(["run", "fake/suite", "--out", "out", *arguments]) == 2
    assert words in capfd.readouterr().err
