"""Messages of docs/troubleshooting.md that timm prints, and what `quest doctor` says of them."""

import os
import re
import subprocess
import sys

import pytest

TORCHVISION = "operator torchvision::nms does not exist"
OF_ANOTHER_BUILD = "import torch; torch.library.register_fake('torchvision::nms')(print)"  # as torchvision does


def doctor(folder):
    """Return the output of `quest doctor` where the modules in `folder` hide others."""
    code = "from quest_core.cli import main; main(['doctor'])"
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.slow
def test_a_torchvision_of_another_build(tmp_path):
    (tmp_path / "quest_suites_environment.py").touch()  # no shim, as in a user's environment
    (tmp_path / "torchvision.py").write_text(OF_ANOTHER_BUILD)
    said = doctor(tmp_path)
    assert re.search(r"quest-timm \S+ with timm \S+: its host timm \S+ cannot be imported: RuntimeError: ", said)
    assert TORCHVISION in said
    assert (
        "fix: python -c 'import timm' shows the whole error; pip install 'quest-timm[host]' --force-reinstall" in said
    )
