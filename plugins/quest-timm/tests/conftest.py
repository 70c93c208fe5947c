"""The tests need what `environment/` gives: torchvision with a CPU build of PyTorch."""

import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).parents[1] / "environment"
try:
    import quest_timm_environment  # there already where ./dev made the environment
except ModuleNotFoundError:
    sys.path.append(str(ENVIRONMENT))
    import quest_timm_environment  # noqa: F401
