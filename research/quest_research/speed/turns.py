"""One version of quest_core, timed turn by turn at another process's command; `versions` runs two of these.

It is run by its path with the interpreter of the version, so it imports only torch and quest_core. Each line on
standard input is a cell in JSON; the answer is the seconds of one call, or null if this version does not have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import quest_core

Call = Callable[[], object]


def call(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a call of a mechanism on q, k, v of one shape (B, H, N, D); G key/value heads if it has a grouping."""
    batch, heads, n, dim = shape
    mechanism = quest_core.Mechanism(attention, num_heads=heads, head_dim=dim).train(backward)
    groups = heads // 2 if "kv_heads" in attention else heads
    q = torch.randn(batch, heads, n, dim, requires_grad=backward)
    k, v = (torch.randn(batch, groups, n, dim, requires_grad=backward) for _ in "kv")

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = mechanism(q, k, v)
        if backward:
            torch.autograd.grad(out, [q, k, v], torch.ones_like(out), allow_unused=True)

    return step


def function(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a call of `quest_core.attention` on q, k, v of one shape (B, H, N, D), without gradients."""
    q, k, v = (torch.randn(shape) for _ in "qkv")
    return lambda: quest_core.attention(q, k, v, attention)


def decode(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a step that decodes one token after the N in a cache, and takes it back."""
    batch, heads, n, dim = shape
    layer = quest_core.Attention(heads * dim, heads, attention).eval()
    filled, one = torch.randn(batch, n, heads * dim), torch.randn(batch, 1, heads * dim)

    def steps() -> None:
        with torch.no_grad():
            cache = quest_core.Cache()
            layer(filled, is_causal=True, cache=cache)
            for _ in range(32):
                layer(one, is_causal=True, cache=cache)

    return steps


def training(attention: str, shape: tuple[int, int, int, int], backward: bool) -> Call:
    """Return a training step of a nn.TransformerEncoder of two layers after `inject`, on B sequences of N tokens."""
    batch, heads, n, dim = shape
    layer = nn.TransformerEncoderLayer(heads * dim, heads, 4 * heads * dim, dropout=0.0, batch_first=True)
    model = quest_core.inject(nn.TransformerEncoder(layer, 2), attention)[0].train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(batch, n, heads * dim)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


KINDS: dict[str, Callable[[str, tuple[int, int, int, int], bool], Call]] = {
    "function": function,
    "module": call,
    "decode": decode,
    "training": training,
}


@functools.lru_cache(1)
def prepared(kind: str, attention: str, shape: tuple[int, int, int, int], backward: bool) -> tuple[Call, int] | None:
    """Return a warm call, and how often a turn repeats it; None if this version refuses it."""
    torch.manual_seed(0)
    try:
        made = KINDS[kind](attention, shape, backward)
        made()
    except Exception as error:
        print(f"{kind} {attention} {shape}: {error!r:.200}", file=sys.stderr)
        return None
    start = time.perf_counter()
    made()
    return made, max(1, int(0.005 / (time.perf_counter() - start)))


def turn(cell: dict[str, Any], repeats: int | None) -> tuple[float | None, int]:
    """Return processor seconds of one call in a cell, the mean of `repeats`, and that number."""
    ready = prepared(cell["kind"], cell["attention"], tuple(cell["shape"]), cell["backward"])
    if ready is None:
        return None, 1
    made, own = ready
    count = own if repeats is None else repeats
    start = time.process_time()
    for _ in range(count):
        made()
    return (time.process_time() - start) / count, count


if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):  # glibc shall keep freed memory, as a training process does
        for threshold in (-1, -3):
            ctypes.CDLL(None).mallopt(threshold, 2**30)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(turn(asked["cell"], asked["repeats"])), flush=True)
