"""Needed by all tests: spconv on a CPU, and Pointcept if QUEST_POINTCEPT_ROOT names a checkout."""

import importlib.util
import os
import sys
from pathlib import Path

from quest_pointcept import train_on_cpu

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
train_on_cpu()
ROOT = os.environ.get("QUEST_POINTCEPT_ROOT")

if ROOT:
    sys.path.insert(0, ROOT)
    CPU = str(HERE / "cpu")
    sys.path.append(CPU)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CPU, os.environ.get("PYTHONPATH")]))  # for children
    spec = importlib.util.spec_from_file_location("pointcept_on_a_cpu", f"{CPU}/sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
