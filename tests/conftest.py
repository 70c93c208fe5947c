"""What every core test relies on: repeatable random numbers and property tests that behave the same everywhere."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import register_random, settings

# Tensors in tests are tiny: a second thread costs more than it computes, and one thread fixes the order of sums.
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30, print_blob=True)
settings.register_profile("dev", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


class _TorchRandom:
    """PyTorch's generator in the form hypothesis asks for, so that an example replays with the numbers it failed on."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps a weak reference
register_random(_TORCH_RANDOM)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds PyTorch before every test, so that no test depends on the ones before it; the value is the seed."""
    torch.manual_seed(0)
    return 0
