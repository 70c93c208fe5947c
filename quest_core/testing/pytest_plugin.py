"""The pytest plugin of the conformance suites: ``pytest -p quest_core.testing.pytest_plugin``.

- Every run draws other random numbers. The header, and the summary of a failed run, name the seed that repeats them:
  ``QUEST_TEST_SEED=1234 pytest ...``.
- Every test starts with one PyTorch thread. The tensors of tests are tiny, and on a busy machine two threads wait for
  each other for minutes.
"""

from __future__ import annotations

import os
import random
import secrets
import sys

import pytest
import torch

SEED = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    text = os.environ.get("QUEST_TEST_SEED", "")
    if text and not (text.isdecimal() and int(text) < 2**32):
        raise pytest.UsageError(f"QUEST_TEST_SEED is '{text}'; it must be a whole number from 0 to {2**32 - 1}")
    config.stash[SEED] = int(text) if text else secrets.randbelow(2**32)
    os.environ["QUEST_TEST_SEED"] = str(config.stash[SEED])  # for the workers of pytest-xdist
    if getattr(config.option, "hypothesis_seed", "") is None:  # hypothesis is installed, and no option names a seed
        config.option.hypothesis_seed = str(config.stash[SEED])
    config.addinivalue_line("markers", "slow: takes seconds, such as a compilation")


def pytest_report_header(config: pytest.Config) -> str:
    return f"QUEST_TEST_SEED={config.stash[SEED]} repeats the random numbers of this run"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.line(pytest_report_header(config), yellow=True)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed the generators of Python, NumPy and PyTorch before every test; returns the seed of this run."""
    value = request.config.stash[SEED]
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(1)  # the test before may have called a command that sets it
