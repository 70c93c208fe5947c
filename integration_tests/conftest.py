"""Triton decides whether to interpret its kernels when first imported: here, before PyTorch's compiler does it."""

from __future__ import annotations

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    from quest_core.kernels import short_triton, unit_triton  # noqa: F401

    del os.environ["TRITON_INTERPRET"]
