"""The core of attention at few tokens on a CPU, forward and backward: QUEST in one step or in several.

    OMP_NUM_THREADS=1 python benchmarks/unit_logits.py [--tokens 29] [--rounds 400]

Microseconds of CPU time a step (median of the rounds), and the median ratio to standard attention computed in the same
round by the same plain formula. The rule behind it: quest_core/kernels/unit_logits.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quest_core import mechanism
from quest_core.mechanisms import mechanism as mechanism_module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=29)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    shape = given.batch, given.tokens, given.heads, given.head_dim
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]  # as projections leave them
    grad = torch.randn(given.batch, given.heads, given.tokens, given.head_dim)

    applies = mechanism_module.unit_logits_applies

    def step(name: str, *, one: bool) -> Callable[[], tuple[Tensor, ...]]:
        made = mechanism(name, num_heads=given.heads, head_dim=given.head_dim)

        def run() -> tuple[Tensor, ...]:
            mechanism_module.unit_logits_applies = applies if one else lambda *_: False
            out, _ = made.forward_with_weights(*(x.transpose(1, 2) for x in inputs))
            return torch.autograd.grad(out, inputs, grad)

        return run

    steps = {
        "standard": step("standard", one=False),
        "quest, one step": step("quest", one=True),
        "quest, several": step("quest", one=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, run in steps.items():
            start = time.process_time()
            for _ in range(5):
                run()
            seconds[name].append((time.process_time() - start) / 5)
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["standard"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:16s} {1e6 * statistics.median(times):7.0f} µs   {middle:.3f} of standard ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
