"""Draws the figures of docs/. Every curve is computed with quest_core or a committed result.

python docs/figures.py                 every figure
python docs/figures.py logits [RUN]    the largest logit in training, of the committed run or of your own
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import quest_core

HERE = Path(__file__).resolve().parent / "figures"
THEMES = (
    ("", "default", ("#b03a2e", "#1f618d", "#1e8449")),
    ("-dark", "dark_background", ("#ec7063", "#5dade2", "#58d68d")),  # for pages with a dark background
)
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
    for suffix, style, colors in THEMES:
        with plt.style.context(style):
            figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
            for name, color in zip(("standard", "quest"), colors, strict=False):
                axes.plot(norms, weight_of_a_growing_key(name, norms), label=name, color=color, linewidth=2)
            axes.set(xlabel="norm of one key, times that of the others", ylabel="attention it gets", ylim=(0, 1))
            axes.legend(frameon=False)
            save(figure, f"growing-key{suffix}.png")


def draw_logits_in_training(results: Path = LOGITS) -> None:
    """docs/figures/logits-in-training.png and its dark form, of a run of stability/rates/vit."""
    from quest_bench.groups import load_cells
    from quest_research.suites.stability import EVERY

    series: dict[str, dict[str, list[list[float]]]] = {}  # rate -> attention -> a list for each seed
    for cell in load_cells(results):
        for key, values in (cell.result or {"series": {}})["series"].items():
            metric, _, rate = key.partition("/")
            if metric == "training_logit":
                series.setdefault(rate, {}).setdefault(cell.spec["attention"], []).append(values)
    for suffix, style, colors in THEMES:
        with plt.style.context(style):
            figure, panels = plt.subplots(1, len(series), sharey=True, figsize=(6.4, 3.2), layout="constrained")
            for axes, (rate, attentions) in zip(panels, series.items(), strict=True):
                for name, color in zip(("standard", "quest", "qknorm-hs"), colors, strict=True):
                    logits = torch.tensor([seed[: min(map(len, attentions[name]))] for seed in attentions[name]])
                    steps = [1, *range(EVERY, EVERY * logits.shape[1], EVERY)]
                    axes.plot(steps, logits.mean(0), color=color, label=name, linewidth=2)
                    axes.fill_between(steps, logits.amin(0), logits.amax(0), color=color, alpha=0.2, linewidth=0)
                axes.set(yscale="log", xlabel="step", title=f"learning rate {rate.removeprefix('lr=')}")
            panels[0].set_ylabel("largest logit")
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
            save(figure, f"logits-in-training{suffix}.png")


def save(figure: Figure, name: str) -> None:
    """Write a figure without the upper and the right edge of its axes."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / name, dpi=150, transparent=True, metadata={"Software": None})


def main() -> None:
    plt.rcParams.update({"font.size": 11})
    if sys.argv[1:2] != ["logits"]:
        draw_growing_key()
    draw_logits_in_training(*map(Path, sys.argv[2:]))


if __name__ == "__main__":
    main()
