"""Messages of docs/troubleshooting.md that tsai prints, and what `quest doctor` says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCHVISION = "operator torchvision::nms does not exist"
OF_ANOTHER_BUILD = "import torch; torch.library.register_fake('torchvision::nms')(print)"  # as torchvision does


def doctor(folder: Path) -> str:
    """Return the output of `quest doctor` where the modules in `folder` hide others."""
    code = "from quest_core.cli import main; main(['doctor', '--timeout', '200'])"
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.stdout


def test_a_torchvision_of_another_build(tmp_path: Path) -> None:
    (tmp_path / "quest_tsai_environment.py").touch()  # no shim, as in a user's environment
    (tmp_path / "torchvision.py").write_text(OF_ANOTHER_BUILD)
    said = doctor(tmp_path)
    assert "with tsai 1.0.1: it cannot be imported: " in said
    assert f"RuntimeError: {TORCHVISION}" in said
