"""The tests need what quest-suites's `environment/` gives: torchvision with a CPU build of PyTorch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "quest-suites" / "environment"))
import quest_suites_environment  # noqa: F401  # there already where ./dev made the environment
