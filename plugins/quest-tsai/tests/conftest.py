"""The tests need what quest-suites's `environment/` gives: torchvision with a CPU build of PyTorch."""

import sys
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[2] / "quest-suites" / "environment"
sys.path.append(str(ENVIRONMENT))
import numpy as np  # noqa: E402
import quest_suites_environment  # noqa: F401, E402  # there already where ./dev made the environment


@pytest.fixture(scope="session")
def problem():
    """Series [60, 3, 20] of three classes that differ in frequency, labels, splits."""
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 3
    steps = np.arange(20)
    x = np.sin(steps * (labels[:, None, None] + 1) * 0.4 + generator.uniform(0, 1, (60, 3, 1)))
    x += 0.1 * generator.standard_normal(x.shape)
    return x.astype(np.float32), np.array(["a", "b", "c"])[labels], (list(range(45)), list(range(45, 60)))
