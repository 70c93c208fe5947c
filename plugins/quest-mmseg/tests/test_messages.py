"""Messages of docs/troubleshooting.md that mmsegmentation and mmengine print, and what `quest doctor` says of them."""

import contextlib
from importlib.metadata import packages_distributions

import pytest

from devtools.running import python

FORK = "onedl-mmsegmentation" in packages_distributions()["mmseg"]
TORCHVISION = "operator torchvision::nms does not exist"
OF_ANOTHER_BUILD = "import torch; torch.library.register_fake('torchvision::nms')(print)"  # as torchvision does


def doctor(folder):
    """Return the lines of `quest doctor` on quest-mmseg where the modules in `folder` hide others."""
    code = "from quest_core.cli import main; main(['doctor'])"
    lines = python("-c", code, cwd=folder, path=[folder])[0].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  quest-mmseg "))
    return "\n".join(lines[first : first + 2])


@pytest.mark.slow
def test_a_torchvision_of_another_build(tmp_path):
    (tmp_path / "torchvision.py").write_text(OF_ANOTHER_BUILD)
    said = doctor(tmp_path)
    assert f": it cannot be imported: RuntimeError: {TORCHVISION}\n    fix: https://quest-attention.github.io" in said


@pytest.mark.slow
def test_mmcv_without_its_operations(tmp_path):
    (tmp_path / "quest_mmengine_environment.py").touch()  # no shim, as in a user's environment
    said = doctor(tmp_path)
    if FORK:  # it does not import them
        assert ": ok" in said
        return
    assert "it cannot be imported: ModuleNotFoundError: No module named 'mmcv._ext'\n    fix: https://" in said


def test_a_setuptools_without_pkg_resources(tmp_path):
    """mmengine imports it when a config names a base in a package."""
    missing = "No module named 'pkg_resources'"
    (tmp_path / "pkg_resources.py").write_text(f"raise ModuleNotFoundError({missing!r})")
    (tmp_path / "own.py").write_text("_base_ = 'mmseg::_base_/default_runtime.py'")
    with contextlib.nullcontext() if FORK else pytest.raises(AssertionError, match=missing):
        python("-c", "from mmengine import Config; Config.fromfile('own.py')", cwd=tmp_path, path=[tmp_path])
