"""The attention of a training in float64, and what hosts' loggers show of it, for tests that compare them."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quest_core import QKClip


@contextmanager
def recorded() -> Iterator[list[tuple[float, float]]]:
    """Yield a list that each call of attention with gradients joins: its largest logit, and its entropy in nats.

    A call is one of scaled_dot_product_attention, or of a softmax over the last of at least three axes.
    """
    seen: list[tuple[float, float]] = []
    inside = [False]  # F.softmax calls Tensor.softmax

    def patched(owner: Any, name: str, logits: Callable[..., Tensor]) -> Any:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            outer = inside[0]
            if not outer and torch.is_grad_enabled() and x.dim() > 2:
                inside[0] = True  # in what follows, too
                z = logits(x, *args, **kwargs)
                p = z.softmax(-1)
                seen.append((z.max().item(), torch.special.entr(p).sum(-1).mean().item()))
            inside[0] = True
            try:
                return original(x, *args, **kwargs)
            finally:
                inside[0] = outer

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        stack.enter_context(patched(F, "scaled_dot_product_attention", _logits))
        for owner in (F, torch, Tensor):
            stack.enter_context(patched(owner, "softmax", lambda z, *_, **__: z.detach().double()))
        yield seen


def check(logged: dict[str, float], calls: list[tuple[float, float]], **tolerance: float) -> None:
    """Fail unless a log has, for each call of attention, a layer with its largest logit and mean entropy.

    Args:
        logged: what a host's logger shows of one step, by the keys of `quest_core.Watch.step`.
        calls: those of that step, of `recorded`.
        tolerance: as for `pytest.approx`.
    """
    layers = [key.removesuffix("/max_logit/max") for key in logged if key.endswith("/max_logit/max")]
    tops, entropies = zip(*calls, strict=True)
    assert [logged[f"{layer}/max_logit/max"] for layer in layers] == pytest.approx(tops, **tolerance)
    assert [logged[f"{layer}/entropy/mean"] for layer in layers] == pytest.approx(entropies, **tolerance)
    assert logged["attention/max_logit"] == pytest.approx(max(tops), **tolerance)
    assert min(entropies) <= logged["attention/entropy"] + 1e-3 <= max(entropies) + 2e-3  # layers differ in heads
    for layer in layers:
        for name in ("max_logit", "entropy", "top_key_share", "query_norm_max", "key_norm_max"):
            low, mean, high = (logged[f"{layer}/{name}/{over}"] for over in ("min", "mean", "max"))
            assert low <= mean <= high


def scalars(folder: Path) -> dict[int, dict[str, float]]:
    """Return what TensorBoard shows of the event files in a folder and its folders: {step: {tag: value}}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, float]] = defaultdict(dict)
    for path in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                found[event.step][tag] = event.value
    return found


@contextmanager
def clipped() -> Iterator[list[dict[str, list[float]]]]:
    """Yield a list that the factors of each step of a QKClip join."""
    found: list[dict[str, list[float]]] = []
    step = QKClip.step

    def call(self: QKClip) -> dict[str, list[float]]:
        found.append(step(self))
        return found[-1]

    with mock.patch.object(QKClip, "step", call):
        yield found


def _logits(
    q: Tensor,
    k: Tensor,
    _v: Tensor,
    attn_mask: Tensor | None = None,
    _dropout_p: float = 0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0,
) -> Tensor:
    q, k = q.detach().double(), k.detach().double()
    z = q @ (k.repeat_interleave(q.shape[1] // k.shape[1], 1) if enable_gqa else k).mT
    z = z * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(z.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return z
    return z.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else z + attn_mask
