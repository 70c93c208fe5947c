"""The binary version of CIFAR-10 (cs.toronto.edu/~kriz/cifar.html)."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from quest_core.errors import ConfigError

TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
TEST = ["test_batch.bin"]


def read(paths: Iterable[Path]) -> tuple[Tensor, Tensor]:
    """Return the images of files, bytes [B, 3, 32, 32], and their labels [B]."""
    raw = bytearray()
    for path in paths:
        size = path.stat().st_size if path.is_file() else 0
        if not size or size % 3073:
            raise ConfigError(
                f"'{path}' is missing or not of CIFAR-10's binary version (cs.toronto.edu/~kriz/cifar.html)"
            )
        raw += path.read_bytes()
    table = torch.frombuffer(raw, dtype=torch.uint8).view(-1, 3073)
    return table[:, 1:].unflatten(1, (3, 32, 32)), table[:, 0].long()
