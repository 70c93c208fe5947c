"""time/timm: forward and backward of a ViT-Tiny of four layers on images of 224×224, against stock timm."""

from __future__ import annotations

from functools import partial

import timm
import torch
from torch import Tensor, nn

import quest_core
import quest_timm  # noqa: F401  # timm accepts attention= from here on
from quest_core.benchmarks import Cell, Progress, Result, beside_stock
from quest_core.hosts.universal import UniversalAdapter


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_core.benchmarks.beside_stock`.

    Args:
        cell: `task` is the way of replacement: the plugin's layers, or a site around scaled_dot_product_attention.
        progress: called after each round.
    """
    rounds, images, device = (
        cell.options["rounds"],
        cell.options["batch"],
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    if cell.smoke:
        rounds, images = 2, 1
    torch.manual_seed(cell.seed)
    x = torch.randn(images, 3, 224, 224, device=device)
    stock, own = (timm.create_model("vit_tiny_patch16_224", depth=4).to(device) for _ in range(2))
    adapter = UniversalAdapter(x) if cell.task == "universal" else "timm"
    own = quest_core.inject(own, cell.attention, adapter=adapter, fresh=True)[0]
    return beside_stock(*(partial(step, model, x) for model in (stock, own)), rounds=rounds, progress=progress)


def step(model: nn.Module, x: Tensor) -> None:
    """One forward and backward pass on images [B, 3, 224, 224]."""
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
