"""The options `--watch-attention`, which logs the largest logit and the entropy, and `--qk-clip`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.logging import metrics
from fairseq.trainer import Trainer

from quest_core import Watch

WATCH = "quest_watch"
"""The attribute of a Trainer that holds its Watch."""


def train_and_watch(stock: Callable[..., Any], self: Trainer, *arguments: Any, **options: Any) -> Any:
    """Make an update, and log the largest logit and the mean entropy of all layers if it was measured.

    ``trainer.quest_watch.history`` holds every layer and head.
    """
    every, clip = (getattr(self.cfg.model, option, 0) for option in ("watch_attention", "qk_clip"))
    if not every and not clip:
        return stock(self, *arguments, **options)
    if WATCH not in vars(self):
        setattr(self, WATCH, Watch(self.get_model(), every=every or 100, clip=clip or None))
    out = stock(self, *arguments, **options)
    watch = getattr(self, WATCH)
    for name, value in watch.totals().items() if watch.step() else ():
        metrics.log_scalar(name, value, priority=1000, round=3)
    return out
