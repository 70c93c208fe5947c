"""gpu/attention: an attention against each back-end of scaled_dot_product_attention on a GPU, by length.

A cell times one attention at one length. All contenders take turns in shuffled order, so a clock that changes slows all
of them alike, and each round gives one ratio for each.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import quest_core
from quest_core.errors import PluginError
from quest_core.mechanism import count_kv_heads
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import Timer, in_turns, peak_mib

BACK_ENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
ON_CPU = ("flash", "math")
MATH_UNTIL = 2048  # tokens; it keeps all weights
FLEX = "FlexAttention"
METRICS = {"time of sdpa": True, "forward time of sdpa": False}
"""Metric -> whether the backward pass runs too."""
SMOKE = {"tokens": 256, "heads": 4, "dim": 8, "rounds": 2, "slice_ms": 0}
SMOKE_LENGTH = 64

Attend = Callable[..., Tensor]
Context = Callable[[], contextlib.AbstractContextManager[object]]


def run(cell: Cell, progress: Progress) -> Result:
    """Time one attention at one length against every back-end of scaled_dot_product_attention that takes the inputs.

    A smoke run is small, and runs on the CPU if CUDA is missing.

    Returns:
        Metrics ``time of sdpa`` (forward and backward) and ``forward time of sdpa``: the median over rounds of the time
        as a multiple of that of the fastest back-end in the same round; ``<metric>/<contender>``, the same for each
        back-end, and for FlexAttention if the attention is quest; ``ms``, ``forward ms`` and on a GPU ``MiB`` and
        ``forward MiB``. Details name the fastest back-end, and why contenders were left out.
    """
    cuda = torch.cuda.is_available()
    if not (cuda or cell.smoke):
        raise PluginError(f"suite '{cell.suite}' needs CUDA, and torch {torch.__version__} sees no GPU")
    options = {**cell.options, **(SMOKE if cell.smoke else {})}
    length, heads, dim = int(cell.task.removeprefix("N=")), options["heads"], options["dim"]
    length = min(length, SMOKE_LENGTH) if cell.smoke else length
    place: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, options["dtype"])} if cuda else {}
    config = quest_core.AttentionConfig.parse(cell.attention)
    if config.option("max_length") is not None:  # a table of positions
        config = quest_core.AttentionConfig.parse({**config.to_dict(), "max_length": length})
    groups = count_kv_heads(config, heads)
    batch = max(1, options["tokens"] // length)
    torch.manual_seed(cell.seed)
    tensors = [  # as projections return them: [B, N, H, D] in memory
        torch.randn(batch, length, h, dim, **place).transpose(1, 2).requires_grad_() for h in (heads, groups, groups)
    ]
    attend = quest_core.Mechanism(config, num_heads=heads, head_dim=dim).to(**place)
    contenders: dict[str, tuple[Attend, Context]] = peers(length, groups < heads, cuda)
    if cell.attention == "quest" and cuda:
        from torch.nn.attention.flex_attention import flex_attention

        contenders[FLEX] = (quest_by_flex(torch.compile(flex_attention, dynamic=False)), contextlib.nullcontext)
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {"batch": batch, "key heads": groups, "left out": {}}
    for done, (metric, backward) in enumerate(METRICS.items(), 1):
        short = "" if backward else "forward "
        own = timer(attend, tensors, backward, contextlib.nullcontext)
        own(2)  # an error of the attention itself fails the cell
        able = {cell.attention: own}
        for name, (other, context) in contenders.items():
            try:
                able[name] = timer(other, tensors, backward, context)
                able[name](2)
            except Exception as error:  # back-ends and compilers refuse inputs in any way
                del able[name]
                details["left out"][f"{short}{name}"] = f"{type(error).__name__}: {error}"[:200]
        found = [name for name in able if name in BACK_ENDS]
        if not found:
            raise PluginError(f"no back-end of scaled_dot_product_attention takes {cell.task}: {details['left out']}")
        times = in_turns(able, options["rounds"], options["slice_ms"] / 1e3, cell.seed)
        fastest = min(found, key=lambda name: statistics.median(times[name]))
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[cell.attention], other, strict=True))
            for name, other in times.items()
        }
        metrics |= {metric: ratios[fastest], f"{short}ms": 1e3 * statistics.median(times[cell.attention])}
        metrics |= {f"{metric}/{name}": ratios[name] for name in able if name != cell.attention}
        if cuda:
            metrics[f"{short}MiB"] = peak_mib(lambda own=own: own(1))  # type: ignore[misc]
        details[f"{short}fastest"] = fastest
        progress(done / len(METRICS), f"{metric} {ratios[fastest]:.3f}")
    return Result(metrics, {}, details)


def peers(length: int, grouped: bool, cuda: bool) -> dict[str, tuple[Attend, Context]]:
    """Return the back-ends of scaled_dot_product_attention to try: name -> the function and the context it runs in."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa: Attend = F.scaled_dot_product_attention
    sdpa = functools.partial(sdpa, enable_gqa=True) if grouped else sdpa
    names = [name for name in BACK_ENDS if (cuda or name in ON_CPU) and (name != "math" or length <= MATH_UNTIL)]
    return {name: (sdpa, functools.partial(sdpa_kernel, getattr(SDPBackend, BACK_ENDS[name]))) for name in names}


def quest_by_flex(flex_attention: Callable[..., Any]) -> Attend:
    """Return QUEST by `flex_attention`, which divides each logit by ‖k‖: q, k, v [B, H, N, D] -> [B, H, N, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).reciprocal()  # [B, H, N]

        def divide(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score * inverse[batch, head, key]

        out: Tensor = flex_attention(q, k, v, score_mod=divide, scale=1.0)
        return out

    return attend


def timer(attend: Attend, tensors: list[Tensor], backward: bool, context: Context) -> Timer:
    """Return a function that times calls, by CUDA's events on a GPU. Entering the context is not timed."""

    def once() -> None:
        with torch.set_grad_enabled(backward):
            out = attend(*tensors)
        if backward:
            out.backward(out.detach())
            for x in tensors:
                x.grad = None

    def seconds(repeats: int) -> float:
        with context():
            if not tensors[0].is_cuda:
                started = time.perf_counter()
                for _ in range(repeats):
                    once()
                return (time.perf_counter() - started) / repeats
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(repeats):
                once()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / repeats

    return seconds
