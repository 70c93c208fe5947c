#!/usr/bin/env python3
"""What the sizes in quest_core were chosen by: every rule that picks a path by a size, timed on both sides of it.

  python benchmarks/rules.py packing         WASTE and SMALL_AREA of quest_core.packing
  python benchmarks/rules.py plain-weights   PLAIN_WEIGHTS of quest_core.mechanisms.normalisers
  python benchmarks/rules.py block-weights   BLOCK_WEIGHTS of quest_core.mechanisms.normalisers
  python benchmarks/rules.py short-softmax   where the plain softmax beats PyTorch's CPU kernel
  python benchmarks/rules.py aft-tiles       KEY_BLOCK, QUERY_BLOCK and MIN_KEY_BLOCK of quest_core.mechanisms.aft_ops
  python benchmarks/rules.py aft-conv        where aft-conv convolves and where it takes blocks

One thread of the CPU, forward and backward, float32. Contenders take turns; what is printed is processor time, so that
other programs on the machine disturb little: the median over the rounds of each one's ratio to the first, in which the
rule's own choice is marked with a star. Times depend on the CPU: run it on yours before you change a rule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import quest_core
from quest_core import PackingPlan, attention_packed, packing
from quest_core.mechanisms import aft_conv, aft_ops, normalisers
from quest_core.mechanisms.base import apply_weights, logits

Call = Callable[[], None]


@contextmanager
def constants(module: Any, **values: Any) -> Iterator[None]:
    """`module` with other values, for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def compare(title: str, calls: dict[str, Call], chosen: str, rounds: int) -> None:
    """One line: the time of the first, and the others as multiples of it in the same round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        repeats[name] = max(1, int(0.02 / max(time.process_time() - start, 1e-6)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.process_time() - start) / repeats[name])
    first = next(iter(calls))
    cells = []
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[first], strict=True))
        cells.append(f"{name} {ratio:.2f}{'*' if name == chosen else ''}")
    print(f"{title:<44} {statistics.median(times[first]) * 1e3:9.3f} ms   " + "   ".join(cells), flush=True)


def step(attend: Callable[..., Tensor], *leaves: Tensor) -> None:
    """Forward and backward."""
    out = attend()
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def inputs(batch: int, heads: int, n: int, dim: int, key_dim: int | None = None) -> list[Tensor]:
    """q, k and v [B, H, N, D], as projections leave them."""
    widths = (dim, dim if key_dim is None else key_dim, dim)
    return [torch.randn(batch, n, heads, width).transpose(1, 2).requires_grad_() for width in widths]


def rule_packing(rounds: int) -> None:
    """More waste makes fewer, larger batches."""
    for title, lengths in {
        "32 graphs of 20 to 30 nodes": torch.randint(20, 31, (32,)).tolist(),
        "64 sequences of 5 to 200 tokens": torch.randint(5, 201, (64,)).tolist(),
        "one of 2000 and 31 of 50 tokens": [2000, *[50] * 31],
    }.items():
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        q, k, v = (torch.randn(sum(lengths), 4, 16, requires_grad=True) for _ in range(3))
        calls: dict[str, Call] = {}
        for waste in (packing.WASTE, 1.0, 1.1, 1.5, 2.0):
            for area in (packing.SMALL_AREA, 0, 2**11, 2**15):
                if waste != packing.WASTE and area != packing.SMALL_AREA:
                    continue
                with constants(packing, WASTE=waste, SMALL_AREA=area):
                    plan = PackingPlan.from_cu_seqlens(cu)
                    count = len(plan.layout("near", q.device).buckets)

                def call(plan: PackingPlan = plan, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                    step(lambda: attention_packed(q, k, v, "quest", cu_seqlens_q=plan), q, k, v)

                calls[f"{waste}·+{area} ({count})"] = call
        compare(title, calls, next(iter(calls)), rounds)


def rule_plain_weights(rounds: int) -> None:
    """Weights that are kept against blocks that are computed again."""
    for spec in ("quest+sigmoid", "quest+sinkhorn"):
        for batch, heads, n in ((8, 4, 197), (32, 6, 197), (4, 8, 512), (1, 8, 1024), (2, 8, 1024), (1, 8, 2048)):
            q, k, v = inputs(batch, heads, n, 64)

            def call(limit: int, spec: str = spec, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                with constants(normalisers, PLAIN_WEIGHTS=limit):
                    step(lambda: quest_core.attention(q, k, v, spec), q, k, v)

            size = batch * heads * n * n
            chosen = "plain" if size < normalisers.PLAIN_WEIGHTS else "blocks"
            title = f"{spec} {(batch, heads, n)}, 2^{torch.tensor(float(size)).log2():.1f} weights"
            compare(
                title, {"plain": lambda call=call: call(2**60), "blocks": lambda call=call: call(0)}, chosen, rounds
            )  # type: ignore[misc]


def rule_block_weights(rounds: int) -> None:
    """Large blocks leave the cache, small ones have thin products."""
    for spec in ("quest+sigmoid", "quest+sinkhorn"):
        q, k, v = inputs(1, 8, 2048, 64)

        def call(size: int, spec: str = spec, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            with constants(normalisers, PLAIN_WEIGHTS=0, BLOCK_WEIGHTS=size):
                step(lambda: quest_core.attention(q, k, v, spec), q, k, v)

        sizes = (normalisers.BLOCK_WEIGHTS, 2**17, 2**19, 2**21, 2**22)
        calls = {f"2^{size.bit_length() - 1}": lambda size=size, call=call: call(size) for size in sizes}  # type: ignore[misc]
        compare(f"{spec} (1, 8, 2048)", calls, next(iter(calls)), rounds)


def rule_short_softmax(rounds: int) -> None:
    """PyTorch's kernel against three plain operations."""
    for dim in (8, 16, 32, 64):
        for n in (9, 16, 20, 25, 31, 32, 40, 47, 48, 60, 63, 64, 79, 100):
            q, k, v = inputs(32, 4, n, dim)

            def fused(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                step(lambda: F.scaled_dot_product_attention(q, k, v, scale=1.0), q, k, v)

            def plain(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                step(lambda: apply_weights(logits(q, k, 1.0).softmax(-1), v), q, k, v)

            plainly = normalisers.product_is_faster(q, k, mask=None, is_causal=False, dropout_p=0.0)
            chosen = "plain" if plainly else "fused"
            compare(f"{n} tokens, {dim} features", {"fused": fused, "plain": plain}, chosen, rounds)


def rule_aft_tiles(rounds: int) -> None:
    """Tiles of [queries, keys]."""
    for spec in ("aft-full(max_length=2048)", "aft-local(max_length=2048)"):
        made = quest_core.mechanism(spec, num_heads=4, head_dim=64)
        q, k, v = inputs(1, 4, 2048, 64)

        def call(made: Any = made, q: Tensor = q, k: Tensor = k, v: Tensor = v, **sizes: int) -> None:
            with constants(aft_ops, **sizes):
                step(lambda: made(q, k, v, is_causal=True), q, k, v)

        ours = (aft_ops.QUERY_BLOCK, aft_ops.KEY_BLOCK, aft_ops.MIN_KEY_BLOCK)
        calls: dict[str, Call] = {}
        for queries, keys, least in (
            ours,
            (128, 256, 64),
            (512, 512, 64),
            (256, 1024, 64),
            (256, 512, 32),
            (256, 512, 128),
        ):
            sizes = {"QUERY_BLOCK": queries, "KEY_BLOCK": keys, "MIN_KEY_BLOCK": least}
            calls[f"{queries}x{keys}, {least}"] = lambda sizes=sizes, call=call: call(**sizes)  # type: ignore[misc]
        compare(spec, calls, next(iter(calls)), rounds)


def rule_aft_conv(rounds: int) -> None:
    """A depth-wise convolution against blocks of queries."""
    for side, heads, dim, batch, window in (
        (7, 6, 64, 8, 11),
        (14, 6, 64, 4, 11),
        (14, 64, 2, 4, 11),
        (32, 6, 64, 1, 11),
        (32, 6, 64, 1, 5),
    ):
        made = quest_core.mechanism(f"aft-conv(window={window})", num_heads=heads, head_dim=dim)
        q, k, v = inputs(batch, heads, side * side, dim, 1)

        def call(convolves: bool, made: Any = made, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            with constants(aft_conv._Kernel, convolves=lambda self: convolves):
                step(lambda: made(q, k, v), q, k, v)

        tokens, taps = side * side, window * window
        chosen = "blocks" if tokens * (1 + 120 / dim) < 7 * taps else "convolution"
        calls = {"convolution": lambda call=call: call(True), "blocks": lambda call=call: call(False)}  # type: ignore[misc]
        compare(f"{side}x{side}, {heads} heads of {dim}, window {window}", calls, chosen, rounds)


RULES = {
    name.removeprefix("rule_").replace("_", "-"): value
    for name, value in list(globals().items())
    if name.startswith("rule_")
}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("rules", nargs="+", choices=RULES, metavar="RULE", help=", ".join(RULES))
    parser.add_argument("--rounds", type=int, default=9, help="how often each contender takes its turn (9)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in given.rules:
        print(f"{name}: {RULES[name].__doc__}")
        RULES[name](given.rounds)


if __name__ == "__main__":
    main()
