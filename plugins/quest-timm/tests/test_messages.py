"""Messages of docs/troubleshooting.md that timm prints, and what `quest doctor` says of them."""

import re

import pytest

from devtools.running import python

TORCHVISION = "operator torchvision::nms does not exist"
OF_ANOTHER_BUILD = "import torch; torch.library.register_fake('torchvision::nms')(print)"  # as torchvision does


@pytest.mark.slow
def test_a_torchvision_of_another_build(tmp_path):
    (tmp_path / "quest_suites_environment.py").touch()  # no shim, as in a user's environment
    (tmp_path / "torchvision.py").write_text(OF_ANOTHER_BUILD)
    doctor = "from quest_core.cli import main; main(['doctor'])"
    said = python("-c", doctor, cwd=tmp_path, path=[tmp_path])[0]
    assert re.search(r"quest-timm \S+ with timm \S+: its host timm \S+ cannot be imported: RuntimeError: ", said)
    assert TORCHVISION in said
    fix = "fix: python -c 'import timm' shows the whole error; pip install 'quest-timm[host]' --force-reinstall"
    assert fix in said
