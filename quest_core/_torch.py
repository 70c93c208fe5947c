"""Import PyTorch first, without its warning that NumPy is missing: quest_core uses none."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch as torch
