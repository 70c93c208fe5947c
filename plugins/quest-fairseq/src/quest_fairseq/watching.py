"""The options `--watch-attention`, which logs what attention does, and `--qk-clip`."""

from collections.abc import Callable
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor

from quest_core import Watch

WATCH = "quest_watch"
"""The attribute of a Trainer that holds its Watch."""


def train_and_watch(stock: Callable[..., Any], self: Trainer, *arguments: Any, **options: Any) -> Any:
    """Make an update, and log what `quest_core.Watch.step` returns of it."""
    every, clip = (getattr(self.cfg.model, option, 0) for option in ("watch_attention", "qk_clip"))
    if not every and not clip:
        return stock(self, *arguments, **options)
    if WATCH not in vars(self):
        setattr(
            self, WATCH, Watch(self.get_model(), every=every or 100, clip=clip or None, steps=self.get_num_updates())
        )
    out = stock(self, *arguments, **options)
    for name, value in getattr(self, WATCH).step().items():
        metrics.log_scalar(name, value, priority=1000, round=3)
    if clip:
        keep_clipped(self.optimizer)
    return out


def keep_clipped(optimizer: Any) -> None:
    """Copy weights that differ from their originals in float32, which --fp16 keeps and copies back, into these."""
    masters = getattr(optimizer, "fp32_params", None)
    if masters is None:
        return
    weights = optimizer.fp16_params
    if optimizer.has_flat_params:  # device -> all of its weights, one after the other
        pairs: list[tuple[Tensor, Tensor]] = []
        for device, flat in masters.items():
            own = [p for p in weights if len(masters) == 1 or p.device.index == device]
            pairs += zip(own, flat.data.split([p.numel() for p in own]), strict=True)
    else:
        pairs = [*zip(weights, (master.data for master in masters), strict=True)]
    for p, master in pairs:
        changed = p.detach().view_as(master)
        master.copy_(torch.where(changed == master.to(p.dtype), master, changed.to(master.dtype)))


def shorten(stock: Callable[..., Any], self: Any, stats: dict[str, Any]) -> Any:
    """Leave the values of single layers out of lines for readers; JSON, TensorBoard and W&B have them."""
    return stock(self, {key: value for key, value in stats.items() if key.count("/") < 3})
