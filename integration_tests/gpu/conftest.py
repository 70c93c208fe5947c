"""Every test that can runs twice: on the CPU at toy sizes, in ./dev test; and on a GPU, marked gpu, in ./dev gpu."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with it, and reads it once

import torch

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
