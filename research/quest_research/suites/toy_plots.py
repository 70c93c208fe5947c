"""The plots of toy/spurious: its details and series, drawn as in the paper's figures 3 and A2."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

OUTCOMES = {"correct": "#009e73", "biased": "#d55e00", "degenerate": "#5f6b7a", "other": "#aa4499"}
KINDS = {
    "unbiased": ("answer, unbiased key", "#009e73"),
    "biased": ("answer, biased key", "#d55e00"),
    "other": ("other tokens", "#5f6b7a"),
}


def plots(rows: pd.DataFrame, results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Figure]]:
    """Title, caption and figure of success by learning rate and weight decay, outcomes, and key norms over training."""
    attentions = list(dict.fromkeys(rows["attention"]))
    models = pd.DataFrame(
        [{"attention": cell["attention"], **model} for cell in results for model in cell["details"]["models"]]
    )
    return [
        (
            "Where training succeeds",
            "Percent of models that found the true rule, by learning rate and weight decay.",
            _heat_maps(models, attentions),
        ),
        (
            "What models learned",
            "Correct: above 90% in training and test. Biased: 50-80% in training, 20-40% in the test. "
            "Degenerate: at most 15% in both, or diverged.",
            _outcomes(models, attentions),
        ),
        (
            "Key norms over training",
            "Mean norm of the projected keys. Lines are means over seeds, bands reach from the lowest to the highest.",
            _norms(results, attentions),
        ),
    ]


def _width(panels: Sequence[str]) -> float:
    """Return the inches of panels in a row: the page is 9.6 wide, and a single panel need not fill it."""
    return max(min(9.6, 3.6 * len(panels)), 2.2 * len(panels))


def _heat_maps(models: pd.DataFrame, attentions: Sequence[str]) -> Figure:
    figure = Figure(figsize=(_width(attentions), 2.8), layout="constrained")
    panels = figure.subplots(1, len(attentions), squeeze=False, sharey=True)[0]
    for axes, attention in zip(panels, attentions, strict=True):
        own = models[models["attention"] == attention]
        success = own.assign(success=100.0 * (own["outcome"] == "correct")).pivot_table(
            index="weight_decay", columns="learning_rate", values="success", aggfunc="mean"
        )
        axes.imshow(success, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for y, line in enumerate(success.to_numpy()):
            for x, value in enumerate(line):
                ink = "black" if value > 55 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
        rates = [f"{v:g}" for v in success.columns]
        axes.set_xticks(range(len(rates)), rates, rotation=45, ha="right", fontsize=8)
        axes.set_yticks(range(success.shape[0]), [f"{v:g}" for v in success.index])
        axes.set_title(attention)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.supxlabel("learning rate", fontsize=9)
    panels[0].set_ylabel("weight decay")
    return figure


def _outcomes(models: pd.DataFrame, attentions: Sequence[str]) -> Figure:
    figure = Figure(figsize=(7.2, 0.95 + 0.42 * len(attentions)), layout="constrained")
    axes = figure.subplots()
    share = pd.crosstab(models["attention"], models["outcome"], normalize="index").mul(100)
    share = share.reindex(index=attentions, columns=list(OUTCOMES), fill_value=0.0)
    share.plot.barh(stacked=True, ax=axes, color=OUTCOMES, legend=False)
    bars: Any
    for bars in axes.containers:  # a narrow piece has no room for its number
        axes.bar_label(bars, label_type="center", fmt=lambda v: f"{v:.0f}" if v >= 6 else "", color="white", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="percent of models", ylabel="")
    axes.grid(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=9)
    return figure


def _norms(results: Sequence[Mapping[str, Any]], attentions: Sequence[str]) -> Figure:
    """One panel for each attention and outcome that occurs: key norms over epochs, mean and range over seeds."""
    names = [
        name for name in ("correct", "biased") if any(f"key_norm_biased/{name}" in cell["series"] for cell in results)
    ]
    suffixes = [(f"/{name}", f"{name} models") for name in names] or [("", "all models")]
    figure = Figure(figsize=(_width(attentions), 2.1 * len(suffixes) + 0.5), layout="constrained")
    grid = figure.subplots(len(suffixes), len(attentions), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for line, (suffix, words) in zip(grid, suffixes, strict=True):
        for axes, attention in zip(line, attentions, strict=True):
            for kind, (label, color) in KINDS.items():
                name = f"key_norm_{kind}{suffix}"
                own = [c["series"][name] for c in results if c["attention"] == attention and name in c["series"]]
                if not own:
                    continue
                wide = pd.DataFrame(own).T
                wide.index += 1
                handles[label] = axes.plot(wide.index, wide.mean(axis=1), color=color, lw=1.5)[0]
                axes.fill_between(wide.index, wide.min(axis=1), wide.max(axis=1), color=color, alpha=0.16, lw=0)
            if not axes.lines:
                axes.text(0.5, 0.5, "no such model", ha="center", va="center", transform=axes.transAxes, fontsize=8)
            axes.set_title(f"{attention}\n{words}", fontsize=9)
            axes.xaxis.get_major_locator().set_params(integer=True)
        line[0].set_ylabel("key norm")
    figure.supxlabel("epoch", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, fontsize=9)
    return figure
