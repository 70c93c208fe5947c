"""A callback that adds measurements of attention to everything that Trainer logs."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from quest_core import Watch

from .adapter import TransformersAdapter


class WatchCallback(TrainerCallback):
    """Measures the attention of Trainer's model at every n-th step, whether it is quest or the model's own.

    >>> from quest_transformers.watching import WatchCallback
    >>> trainer = Trainer(model=model, args=args, callbacks=[WatchCallback(every=100)])

    The values (see `quest_core.Watch.step`) join Trainer's next log, and so its progress bar, `log_history`,
    TensorBoard, W&B, ... Choose `every` as `logging_steps`: with a divisor of it, a log has the last measurement; with
    a multiple, only some logs have one.

    Args:
        every, example, clip: as for :class:`quest_core.Watch`.
    """

    def __init__(self, every: int = 100, example: Any = None, clip: float | None = None) -> None:
        self.every, self.example, self.clip = every, example, clip
        self.watch: Watch | None = None
        self.values: dict[str, float] = {}
        # Trainer's own callbacks write the log before this one is asked.
        TransformersAdapter.patches.around("transformers.trainer:Trainer", "log", _log)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        steps = state.global_step
        self.watch = Watch(model, every=self.every, example=self.example, clip=self.clip, steps=steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.watch is not None  # Trainer begins first
        self.values |= self.watch.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.close()


def _log(log: Callable[..., None], trainer: Any, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WatchCallback) and "loss" in logs:
            logs, callback.values = {**logs, **callback.values}, {}
    log(trainer, logs, *arguments, **options)
