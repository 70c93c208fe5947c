"""Needed by all tests: spconv on a CPU, and a note on the tests that need Pointcept itself."""

import importlib.util
import os
import sys
from pathlib import Path

from devtools.pytest_plugin import NOT_RUN
from quest_pointcept import train_on_cpu

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
train_on_cpu()
ROOT = os.environ.get("QUEST_POINTCEPT_ROOT")
REQUIRED = os.environ.get("QUEST_REQUIRE_POINTCEPT") == "1"

if ROOT:
    sys.path.insert(0, ROOT)
    CPU = str(HERE / "cpu")
    sys.path.append(CPU)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CPU, os.environ.get("PYTHONPATH")]))  # for children
    spec = importlib.util.spec_from_file_location("pointcept_on_a_cpu", f"{CPU}/sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
else:
    NOT_RUN.append(
        "quest-pointcept's tests in a real Pointcept (test_pointcept.py); set QUEST_POINTCEPT_ROOT to a checkout whose "
        "requirements are installed. QUEST_REQUIRE_POINTCEPT=1 makes their absence a failure"
    )
    collect_ignore = [] if REQUIRED else ["test_pointcept.py"]
