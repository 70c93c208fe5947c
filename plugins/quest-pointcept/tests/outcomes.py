"""Compare a loader with its row of docs/checkpoints.md."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from devtools import matrix


def check(
    host: str,
    name: str,
    loaders: dict[str, Callable[[Path, str | None], nn.Module]],
    build: Callable[[str | None], nn.Module],
    folder: Path,
) -> None:
    """Load checkpoints of models that `build` makes by `loaders[name]`, which returns the loaded model."""

    def load(checkpoint: str, model: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        state = dict(build(None if checkpoint == "stock" else checkpoint).state_dict())
        torch.save({"epoch": 1, "state_dict": state}, folder / "model.pth")
        loaded = loaders[name](folder / "model.pth", None if model == "stock" else model).state_dict()
        (first, *_) = (key for key in state if key.endswith("qkv.weight"))
        return loaded[first], state[first]

    matrix.check_loader(load, host, name, among=loaders, named=False)
