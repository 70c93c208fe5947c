"""No test reaches the network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture
def fresh_python():
    """Run a script in a new interpreter and return its output and its errors; its failure fails the test."""

    def run(script, cwd, **options):
        done = subprocess.run(
            [sys.executable, *options.get("flags", ()), "-c", script],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    return run
