"""Draws the figures of docs/. Every curve is computed with quest_core or a committed result.

python docs/figures.py                 every figure
python docs/figures.py logits [RUN]    the largest logit in training, of the committed run or of your own
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import quest_core

HERE = Path(__file__).resolve().parent / "figures"
LOGITS = HERE.parents[1] / "research" / "results" / "stability" / "logits"


def weight_of_a_growing_key(name: str, norms: Tensor) -> list[float]:
    """The share that one of 16 keys gets from a query at 60 degrees to it, when that key's norm is multiplied."""
    generator = torch.Generator().manual_seed(0)
    dim, count = 16, 16
    query = torch.zeros(1, 1, 1, dim)  # [B, H, N, D]
    query[..., 0] = 4.0
    keys = torch.randn(1, 1, count, dim, generator=generator)  # [B, H, M, D]
    keys[..., 0, :] = 0.0
    keys[..., 0, 0], keys[..., 0, 1] = 0.5 * dim**0.5, 0.75**0.5 * dim**0.5  # 60 degrees, the norm of the others
    values = torch.eye(count).reshape(1, 1, count, count)  # the output is the weights
    shares = []
    for norm in norms:
        grown = keys.clone()
        grown[..., 0, :] *= norm
        shares.append(quest_core.attention(query, grown, values, name)[0, 0, 0, 0].item())
    return shares


def draw_growing_key() -> None:
    """docs/figures/growing-key.png, and growing-key-dark.png for pages with a dark background."""
    norms = torch.linspace(0.25, 8, 100)
    for suffix, style, colours in (
        ("", "default", ("#b03a2e", "#1f618d")),
        ("-dark", "dark_background", ("#ec7063", "#5dade2")),
    ):
        with plt.style.context(style):
            figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
            for name, colour in zip(("standard", "quest"), colours, strict=True):
                axes.plot(norms, weight_of_a_growing_key(name, norms), label=name, color=colour, linewidth=2)
            axes.set(xlabel="norm of one key, times that of the others", ylabel="attention it gets", ylim=(0, 1))
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
            path = HERE / f"growing-key{suffix}.png"
            figure.savefig(path, dpi=150, transparent=True, metadata={"Software": None})


def draw_logits_in_training(results: Path = LOGITS) -> None:
    """docs/figures/logits-in-training.png, a picture of the report of a run of stability/rates/vit."""
    from quest_bench.report import write_page

    with tempfile.TemporaryDirectory() as made:
        write_page(results, Path(made), "standard")
        shutil.copy(Path(made) / "report" / "01-vit-largest-logit-in-training.png", HERE / "logits-in-training.png")


def main() -> None:
    HERE.mkdir(exist_ok=True)
    if sys.argv[1:2] == ["logits"]:
        draw_logits_in_training(*map(Path, sys.argv[2:]))
        return
    plt.rcParams.update({"font.size": 11})
    draw_growing_key()
    draw_logits_in_training()


if __name__ == "__main__":
    main()
