"""The options `--watch-attention`, which logs what attention does, and `--qk-clip`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.logging import metrics
from fairseq.trainer import Trainer

from quest_core import Watch

WATCH = "quest_watch"
"""The attribute of a Trainer that holds its Watch."""


def train_and_watch(stock: Callable[..., Any], self: Trainer, *arguments: Any, **options: Any) -> Any:
    """Make an update, and log what `quest_core.Watch.step` returns of it."""
    every, clip = (getattr(self.cfg.model, option, 0) for option in ("watch_attention", "qk_clip"))
    if not every and not clip:
        return stock(self, *arguments, **options)
    if WATCH not in vars(self):
        setattr(self, WATCH, Watch(self.get_model(), every=every or 100, clip=clip or None))
    out = stock(self, *arguments, **options)
    for name, value in getattr(self, WATCH).step().items():
        metrics.log_scalar(name, value, priority=1000, round=3)
    return out


def shorten(stock: Callable[..., Any], self: Any, stats: dict[str, Any]) -> Any:
    """Leave the values of single layers out of lines for readers; JSON, TensorBoard and W&B have them."""
    return stock(self, {key: value for key, value in stats.items() if key.count("/") < 3})
