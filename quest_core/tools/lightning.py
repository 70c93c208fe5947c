"""A callback that logs measurements of attention; `lightning` or `pytorch_lightning` must be installed."""

import sys
from typing import Any

from .watch import Watch

if "pytorch_lightning" in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class WatchAttention(Callback):  # type: ignore[misc]
    """Logs what attention does at every n-th batch; see :class:`quest_core.Watch`.

    >>> from quest_core.tools.lightning import WatchAttention
    >>> trainer = Trainer(callbacks=[WatchAttention(every=100)])

    Args:
        every, example, clip: as for `Watch`.
    """

    def __init__(self, every: int = 100, example: Any = None, clip: float | None = None) -> None:
        self.every, self.example, self.clip = every, example, clip
        self.watch: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch = Watch(pl_module, every=self.every, example=self.example, clip=self.clip)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.watch is not None and (values := self.watch.step()):
            pl_module.log_dict(values)

    def on_train_end(self, *_: Any) -> None:
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()
