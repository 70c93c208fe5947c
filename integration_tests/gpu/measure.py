"""Memory and the kernels that ran, on a GPU or on the CPU. Needs only PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


def peak_bytes(call: Call, device: str) -> int:
    """Return the most memory that `call` adds at a time."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


BACK_ENDS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_attention_math": "math",
}


def back_ends(call: Call) -> set[str]:
    """Which implementations of scaled_dot_product_attention ran in `call`, as the profiler saw them."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {BACK_ENDS[event.name] for event in seen.events() if event.name in BACK_ENDS}
