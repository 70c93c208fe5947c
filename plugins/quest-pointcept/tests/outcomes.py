"""Compare a loader with its row of docs/checkpoints.md."""

import torch

from devtools import matrix


def check(host, name, loaders, build, folder):
    """Load checkpoints of models that `build` makes by `loaders[name]`, which returns the loaded model."""

    def load(checkpoint, model):
        torch.manual_seed(0)
        state = dict(build(None if checkpoint == "stock" else checkpoint).state_dict())
        torch.save({"epoch": 1, "state_dict": state}, folder / "model.pth")
        loaded = loaders[name](folder / "model.pth", None if model == "stock" else model).state_dict()
        (first, *_) = (key for key in state if key.endswith("qkv.weight"))
        return loaded[first], state[first]

    matrix.check_loader(load, host, name, among=loaders, named=False)
