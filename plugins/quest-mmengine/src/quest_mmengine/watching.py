"""A hook that writes measurements of attention to mmengine's log and visualizers (TensorBoard, W&B, ...)."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper

from quest_core import Watch


class WatchAttention(Hook):  # type: ignore[misc]
    """Measures the attention of a Runner's model at every n-th iteration, whether it is quest or the model's own.

    >>> custom_hooks = [dict(type="quest_mmseg.WatchAttention", every=100)]

    The log line gets the largest logit and the mean entropy over all layers and heads; the visualizers get every layer
    too. Choose `every` as the interval of the LoggerHook, or a divisor; with a larger `every`, lines repeat the latest
    measurement.

    Args:
        every, clip: as for :class:`quest_core.Watch`.
    """

    def __init__(self, every: int = 100, clip: float | None = None) -> None:
        self.every, self.clip = every, clip
        self.watch: Watch | None = None

    def before_train(self, runner: Any) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self.watch = Watch(model, every=self.every, clip=self.clip, steps=runner.iter)

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        assert self.watch is not None  # the runner begins first
        if values := self.watch.step():
            for name in ("max_logit", "entropy"):
                if (value := values.get(f"attention/{name}")) is not None:
                    runner.message_hub.update_scalar(f"train/{name}", value)
            runner.visualizer.add_scalars(values, step=runner.iter + 1)

    def after_train(self, runner: Any) -> None:
        if self.watch is not None:
            self.watch.close()
