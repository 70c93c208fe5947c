"""Ratios, memory and the kernels that ran, on a GPU or on the CPU. Needs only PyTorch."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call, as the median of the rounds, and ratios to the peer of the same round: median, quartiles."""

    milliseconds: float
    ratio: float
    low: float
    high: float
    rounds: int


def against(own: list[float], peer: list[float]) -> Timing:
    """Round by round."""
    ratios = [a / b for a, b in zip(own, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Timing(1e3 * statistics.median(own), middle, low, high, len(own))


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
    for event in seen.profiler.kineto_results.events():
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


def versions(device: str) -> dict[str, str]:
    """The device and the software that the numbers depend on."""
    import platform

    found = {"device": torch.cuda.get_device_name() if device.startswith("cuda") else f"cpu ({platform.machine()})"}
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability()
        found |= {"compute capability": f"{major}.{minor}", "cuda": str(torch.version.cuda)}
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {**found, "torch": str(torch.__version__), "python": platform.python_version()}
