"""The committed measurements still run, at their smallest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMANDS = {
    "ragged_batches.py": ["--only", "ZINC", "--seconds", "0.05"],
}


def test_every_script_has_a_command() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert scripts == set(COMMANDS)


@pytest.mark.parametrize("script", COMMANDS)
def test_a_measurement_runs(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *COMMANDS[script]]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quest" in done.stdout
