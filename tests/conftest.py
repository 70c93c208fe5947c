"""Property tests: how many examples they draw, and that an example replays with the tensors it failed on."""

import os

import torch
from hypothesis import register_random, settings

for name, examples in (("ci", 30), ("dev", 60), ("thorough", 1000)):
    # hypothesis's own profile for CI, the default there, draws the same examples in every run
    settings.register_profile(name, derandomize=False, deadline=None, max_examples=examples, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


class _TorchRandom:
    """PyTorch's generator in the form hypothesis asks for."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps a weak reference
register_random(_TORCH_RANDOM)
