"""A callback that adds measurements of attention to what fastai logs after each epoch."""

import math
from typing import Any

from fastai.learner import Callback, ValueMetric

from quest_core import Watch


class WatchAttention(Callback):  # type: ignore[misc]
    """Measures the attention of a Learner at every n-th batch of training, whether it is quest or the model's own.

    >>> from quest_tsai.watching import WatchAttention
    >>> learn = TSClassifier(X, y, splits=splits, arch="TSTPlus", cbs=WatchAttention())

    What fastai logs the epochs to (CSVLogger, TensorBoard, W&B) gets a column for each value of the epoch's latest
    measurement (see `quest_core.Watch.step`). Of these, the printed table shows the largest logit and the mean entropy.

    Args:
        every, example, clip: as for :class:`quest_core.Watch`.
    """

    order = 40  # before the Recorder, which lists the columns in its before_fit
    watch: Watch | None = None  # here, because an exported callback has lost its own
    _stateattrs = ("watch",)  # fastai leaves these out of what it exports

    def __init__(self, every: int = 100, example: Any = None, clip: float | None = None) -> None:
        super().__init__()
        self.every, self.example, self.clip = every, example, clip

    def before_fit(self) -> None:
        self.after_fit()  # of a fit that was interrupted
        self.watch = watch = Watch(self.learn.model, every=self.every, example=self.example, clip=self.clip)
        columns = [ValueMetric(lambda key=key: watch.latest.get(key, math.nan), key) for key in watch.names()]
        self.learn.metrics = [*self.learn.metrics, *columns]
        if hasattr(self.learn, "progress"):
            table = self.learn.progress
            table._write_stats = lambda row: type(table)._write_stats(table, self._narrow(row))

    def _narrow(self, row: Any) -> list[Any]:
        """Return a row of the table of epochs without the columns of single layers, whose names have three slashes."""
        return [x for x, name in zip(row, self.learn.recorder.metric_names, strict=False) if name.count("/") < 3]

    def after_batch(self) -> None:
        if self.training and self.watch is not None:
            self.watch.step()

    def after_fit(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.learn.metrics = [metric for metric in self.learn.metrics if "attention/" not in metric.name]
        if hasattr(self.learn, "progress"):
            vars(self.learn.progress).pop("_write_stats", None)

    after_cancel_fit = after_fit
