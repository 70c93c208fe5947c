"""A callback that adds measurements of attention to the table of epochs that fastai prints and logs."""

from __future__ import annotations

import math
from typing import Any

from fastai.learner import Callback, ValueMetric

from quest_core import Watch


class WatchAttention(Callback):  # type: ignore[misc]
    """Measures the attention of a Learner at every n-th batch of training, whether it is quest or the model's own.

    >>> from quest_tsai.watching import WatchAttention
    >>> learn = TSClassifier(X, y, splits=splits, arch="TSTPlus", cbs=WatchAttention())

    The table of epochs, and whatever fastai logs it to (CSVLogger, TensorBoard, W&B), gets two columns: the largest
    logit and the mean entropy of the epoch's latest measurement. Layers and heads stand in ``watch.history``.

    Args:
        every, example, clip: as for :class:`quest_core.Watch`.
    """

    order = 60  # after the Recorder

    def __init__(self, every: int = 100, example: Any = None, clip: float | None = None) -> None:
        super().__init__()
        self.every, self.example, self.clip = every, example, clip
        self.watch: Watch | None = None

    def after_create(self) -> None:
        """Add the columns, before fastai's Recorder lists them."""
        for name in ("max_logit", "entropy"):
            self.learn.metrics = [*self.learn.metrics, ValueMetric(lambda key=name: self._value(key), name)]

    def _value(self, name: str) -> float:
        return math.nan if self.watch is None else self.watch.totals().get(name, math.nan)

    def before_fit(self) -> None:
        self.watch = Watch(self.learn.model, every=self.every, example=self.example, clip=self.clip)

    def after_batch(self) -> None:
        if self.training and self.watch is not None:
            self.watch.step()

    def after_fit(self) -> None:
        if self.watch is not None:
            self.watch.close()

    after_cancel_fit = after_fit
