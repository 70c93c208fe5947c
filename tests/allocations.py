"""How many bytes a call allocates."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocated(call: Callable[[], object]) -> int:
    """Return the bytes of all tensors that `call` allocates on a CPU, temporary ones included."""
    call()  # what is made once does not count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)
