"""PyTorch's private names and the differences between its versions, each behind one function with a plain fallback.

Other files of quest_core read no private names of PyTorch, except the dictionaries, hooks and calls of nn.Module, the
base of a view, and the derivative of weight_norm.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn.modules.module import _global_backward_hooks as _backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as _backward_pre_hooks
from torch.nn.modules.module import _global_forward_hooks as _forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as _forward_pre_hooks
from torch.utils.weak import WeakIdKeyDictionary

from .errors import UnsupportedError

VERSION = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])

ATTENTION = F.scaled_dot_product_attention  # as PyTorch defines it, before anything wraps it
FUSED_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLEX_ATTENTION = torch.ops.higher_order.flex_attention  # as a TorchFunctionMode sees it

Made = TypeVar("Made")
Function = TypeVar("Function", bound=Callable[..., Any])

is_compiling = torch.compiler.is_compiling  # whether torch.compile or torch.export reads this code


def is_compiling_without_dynamo() -> bool:
    """Return whether torch.export runs this code itself, on tensors that have no values."""
    return is_compiling() and not torch.compiler.is_dynamo_compiling()


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 if `dtype` is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Whether torch.jit.trace is recording: sizes are tensors, and what a comparison says is frozen.
is_tracing: Callable[[], object] = torch._C._get_tracing_state


def size(x: Tensor, axis: int) -> int:
    """Return a size of `x` as a number, fixed in what torch.jit.trace records: the features of a head, say."""
    if not is_tracing():
        return x.shape[axis]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return int(x.shape[axis])


def constant_result(function: Function) -> Function:
    """Mark a function that torch.compile calls instead of reading it; the result is a constant in the graph.

    torch.compiler.assume_constant_result does the same, but imports the whole compiler first, which takes seconds.
    Dynamo stores the result as a global under the name in the code, where it must not replace the function.
    """
    function.__code__ = function.__code__.replace(co_name=f"result_of_{function.__name__}")
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result  # Dynamo itself always answers False
def is_exporting_to_onnx() -> bool:
    """Return whether torch.onnx.export is reading this code."""
    return bool(torch.onnx.is_in_onnx_export())


def is_traced_to_onnx() -> bool:
    """Return whether torch.onnx.export(dynamo=False) records this code."""
    return bool(is_tracing()) and is_exporting_to_onnx()


def refuse_to_count_keys(attention: str) -> None:
    """Raise UnsupportedError if torch.onnx.export(dynamo=False) records this code, because it fixes numbers of keys."""
    if is_traced_to_onnx():
        raise UnsupportedError(
            f"attention '{attention}' counts its keys, and torch.onnx.export(dynamo=False) fixes their number; say "
            "dynamo=True"
        )


# Whether torch.export or torch.onnx runs this code, PyTorch 2.7; before, whether torch.onnx does.
is_exporting_graph: Callable[[], bool] = getattr(torch.compiler, "is_exporting", is_exporting_to_onnx)


def is_one_in_example(length: Any) -> bool:
    """Return whether torch.onnx.export(dynamo=True) records a dynamic size that is 1 in its example."""
    return is_exporting_to_onnx() and getattr(getattr(length, "node", None), "hint", None) == 1


def refuse_one_token(attention: object, *lengths: Any) -> None:
    """Raise UnsupportedError if torch.onnx.export(dynamo=True) has an example of one token, whose length it fixes."""
    if any(map(is_one_in_example, lengths)):
        raise UnsupportedError(
            f"attention '{attention}' cannot be exported by torch.onnx.export from an example of one token, which "
            "fixes that number in the graph; give an example of two or more tokens"
        )


def is_exporting() -> bool:
    """Return whether the code is being written down for another runtime: torch.export, ONNX or torch.jit.trace."""
    return bool(is_tracing()) or is_exporting_graph()


_CALL = nn.Module.__call__  # as PyTorch defines it; exporters and FX replace it to record which module ran
_is_torch_func_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transform() -> str | None:
    """Return the name of the active function transform, or None, as inside torch.compile and torch.export."""
    if not (_is_torch_func_active() or forward_ad._current_level >= 0) or is_compiling():
        return None
    return "torch.func" if _is_torch_func_active() else "forward-mode differentiation"


def is_eager() -> bool:
    """Return whether nothing records, compiles or transforms this code.

    Only then may it use a derivative of its own, take blocks of queries, or read numbers.
    """
    return not (is_compiling() or is_tracing() or _is_torch_func_active() or forward_ad._current_level >= 0)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are one, or alias all entries of one, as reentrant checkpointing hands them on."""
    if one is other or one.shape != other.shape or one.stride() != other.stride() or not is_eager():
        return one is other
    return may_read(one) and may_read(other) and one.data_ptr() == other.data_ptr()


def without_hooks(one: Any, other: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the `forward` of each of two modules, or the modules themselves if a hook or a recorder needs the call.

    nn.Module.__call__ takes a microsecond to find out that it has nothing to do.
    """
    watched = (
        one._forward_hooks
        or one._forward_pre_hooks
        or one._backward_hooks
        or one._backward_pre_hooks
        or other._forward_hooks
        or other._forward_pre_hooks
        or other._backward_hooks
        or other._backward_pre_hooks
        or one._compiled_call_impl is not other._compiled_call_impl
        or _forward_hooks
        or _forward_pre_hooks
        or _backward_hooks
        or _backward_pre_hooks
        or nn.Module.__call__ is not _CALL
        or is_tracing()
    )
    return (one, other) if watched else (one.forward, other.forward)


def fx_node(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a node that calls `module` if torch.fx.symbolic_trace, which has no shapes, runs this code; else None."""
    if nn.Module.__call__ is _CALL:
        return None
    proxy = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
    if proxy is None:
        return None
    tracer: Any = proxy.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)


class FxLeaf(nn.Module):
    """A module that torch.fx.symbolic_trace records as one call, with any tracer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, in as many Python calls as nn.Module makes."""
        if nn.Module.__call__ is _CALL and self._compiled_call_impl is None:
            return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        node = fx_node(self, args, kwargs)
        return super().__call__(*args, **kwargs) if node is None else node


_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_get_mode: Callable[[Any], object] = torch._C._get_dispatch_mode
# FakeTensorMode, and those of make_fx. In others, such as a counter of FLOPs, tensors have numbers.
_WITHOUT_NUMBERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor  # of torch.vmap


def may_read(x: Tensor) -> bool:
    """Return whether eager code may branch on the numbers in `x`: it has some, and no CUDA graph is being captured."""
    near = not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    if _count_modes() and any(_get_mode(key) is not None for key in _WITHOUT_NUMBERS):
        return False
    return near and type(x) in (Tensor, nn.Parameter) and not _is_batched(x) and x.numel() > 0


def has_numbers(x: Tensor) -> bool:
    """Return whether `x` is more than a shape, as tensors of FakeTensorMode and of the meta device are."""
    return not (x.is_meta or isinstance(x, FakeTensor))


_answers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> question -> its latest view and the answer


def until_changed(x: Tensor, question: object, answer: Callable[[], Made]) -> Made:
    """Return answer(), which reads the numbers in `x`, or what it returned before if they have not changed since.

    Each `question` has its own answer. PyTorch does not count changes of inference tensors: they are always read.
    """
    if x.is_inference():
        return answer()
    kept = _answers.setdefault(x if x._base is None else x._base, {})
    view = (x.dtype, x.shape, x.stride(), x.storage_offset(), x._version)
    if kept.get(question, (None,))[0] != view:
        kept[question] = view, answer()
    return kept[question][1]  # type: ignore[no-any-return]


def is_recomputing() -> bool:
    """Return whether a backward pass is running in this thread; checkpointing repeats a forward pass then."""
    return not is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def tokens_are_divided() -> bool:
    """Return whether this runs inside torch's context_parallel, which replaces only scaled_dot_product_attention."""
    current = F.scaled_dot_product_attention
    replaced = current is not ATTENTION and not is_compiling()
    return replaced and str(getattr(current, "__module__", "")).startswith("torch.distributed.tensor.experimental")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the lower type that autocast computes in on this device, or None if autocast is off there."""
    try:
        enabled = torch.is_autocast_enabled(device_type)
    except RuntimeError:  # a device that autocast does not know, such as meta
        return None
    return torch.get_autocast_dtype(device_type) if enabled else None


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn autocast off, which would run products in half precision; do nothing if it is off already."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def same_random_state(model: nn.Module) -> AbstractContextManager[Any]:
    """Restore the random state of the CPU and of the GPUs of the model at the end of the block."""
    return torch.random.fork_rng(sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"}))


def name_second_derivative(out: Tensor, name: str) -> None:
    """Let a second derivative of `out`, which attention `name` returned, raise an error that says how to get one."""
    node = None if is_compiling() else out.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node._register_hook_dict(_refusal(name))


@functools.cache
def _refusal(name: str) -> Tensor:
    """Return a tensor whose hooks all nodes of attention `name` share; a hook for each takes four times as long."""

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            raise UnsupportedError(
                f"attention '{name}': a second derivative (create_graph=True) is not possible through PyTorch's fused "
                "kernel; run the forward pass inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
            )

    carrier = torch.zeros((), device="cpu", requires_grad=True)
    carrier.register_hook(refuse)
    return carrier


_FLEX = "torch.nn.attention.flex_attention"
INDUCTOR = "torch._inductor."  # how the names of modules begin that hold compiled graphs


def force_eager() -> AbstractContextManager[Any]:
    """Let compiled functions run as they are written; flex_attention compiles itself."""
    compiles = {"torch._dynamo", _FLEX} & sys.modules.keys()  # else nothing is compiled
    return torch.compiler.set_stance("force_eager") if compiles and VERSION >= (2, 6) else nullcontext()


def uncompiled(function: Function) -> Function:
    """Return a function of which torch.compile compiles nothing, not even a part."""
    loaded = "torch._dynamo" in sys.modules  # else nothing is compiled, and importing the compiler takes seconds
    return torch.compiler.disable(function) if loaded else function


@constant_result
def flex_attention_compiles_itself() -> bool:
    """Return whether Dynamo runs because flex_attention was called in eager code, whose graph calls it once more."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_FLEX, "flex_attention"):
            return True
        frame = frame.f_back
    return False


def require(what: str, version: tuple[int, int]) -> None:
    """Raise UnsupportedError if the installed PyTorch is older than `version`; `what` begins the message."""
    if version > VERSION:
        needed = ".".join(map(str, version))
        raise UnsupportedError(
            f"{what} needs PyTorch {needed} or newer, and {torch.__version__} is installed; "
            f"pip install 'torch>={needed}'"
        )
