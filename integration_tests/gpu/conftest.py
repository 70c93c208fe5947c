"""Every test that can runs twice: on the CPU at toy sizes, in ./dev test; and on a GPU, marked gpu, in ./dev gpu."""

import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with it, and reads it once

import torch

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return str(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
