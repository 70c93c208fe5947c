"""How many bytes a call allocates, and how large its largest tensor is."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quest_core.mechanisms.aft_ops import aft_biased, aft_biased_backward


def allocated(call: Callable[[], object]) -> int:
    """Return the bytes of all tensors that `call` allocates on a CPU, temporary ones included."""
    call()  # what is made once does not count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes, inside our own operators too, and the sum of all.

    Views of tensors that an operation is given are not made.
    """

    elements = made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for own in (aft_biased, aft_biased_backward):
            if own._opoverload is func:
                with self:
                    return own._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                size = x.untyped_storage().nbytes() // x.element_size()
                self.elements, self.made = max(self.elements, size), self.made + size
        return out
