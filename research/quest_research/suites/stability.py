"""Suite stability/rates: which learning rates a model survives, as in QUEST's figure A6 and sensitivity experiments.

A cell trains one attention from the same weights at each of several learning rates, half a decade apart. A rate at
which a loss is not finite has diverged: it stays in the result, with the accuracy of guessing. Nothing clips gradients.

Task "vit" is the Vision Transformer of images/*, on Fashion-MNIST. Task "pydocs" is a causal model of the characters
of Python's documentation topics; its accuracy is that of the next character in held-out text.

Warm-up, depth, precision and QK-clip are options, for example `--set warmup=0,100 --set layers=4,12`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import quest_core
from quest_suites.contract import Cell, Progress, Result, Trained, observe, over_rates

from . import calibration, images
from .images import Block, Split, accuracy, classify, start
from .training import DivergedError

CONTEXT = 64
"""Characters that the language model sees."""
EVERY = 10
"""Steps from one measurement of the largest logit in training to the next; the first step is measured too."""
WATCHED = ("max_logit", "entropy", "query_norm", "key_norm")


@dataclass(frozen=True)
class Problem:
    """Data and model of a task.

    Attributes:
        make: builds the model.
        guess: the accuracy of guessing, in %.
    """

    train: Split
    validation: Split
    test: Split
    make: Callable[[], nn.Module]
    guess: float


def vit(cell: Cell, options: Mapping[str, Any], draw: torch.Generator) -> Problem:
    """Return the Vision Transformer and its images."""
    data = images.load(cell.data, options, draw)
    return Problem(
        data.train,
        data.validation,
        data.test,
        lambda: images.build(cell.attention, data, options),
        100 / data.classes,
    )


def pydocs(cell: Cell, options: Mapping[str, Any], draw: torch.Generator) -> Problem:
    """Return the language model and its text; the last tenth of the text is for validation and test."""
    text, rest, vocabulary = calibration.corpus()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def windows(of: Tensor, count: int) -> Split:
        first = torch.randint(len(of) - CONTEXT, (count, 1), generator=draw)
        pieces = of[first + torch.arange(CONTEXT + 1)].to(device)  # [count, N + 1]
        return pieces[:, :-1], pieces[:, 1:]

    half = len(rest) // 2
    return Problem(
        windows(text, options["train"]),
        windows(rest[:half], options["validation"]),
        windows(rest[half:], options["test"]),
        lambda: LanguageModel(cell.attention, vocabulary, options).to(device),
        100 / vocabulary,
    )


class LanguageModel(nn.Module):
    """A causal pre-norm Transformer over characters."""

    def __init__(self, attention: str, vocabulary: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = options["width"], options["heads"]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, causal=True) for _ in range(options["layers"]))
        quest_core.chain(self)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        start(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, N] -> logits [B, N, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with one seed at every learning rate.

    Args:
        cell: `task` is "vit" or "pydocs"; `data` is for "vit", see `images.load`.
        progress: called after each epoch.

    Returns:
        What `over_rates` returns, with series ``train_loss/lr=R`` and so on, also for the values of `WATCHED`, and
        ``training_logit``, the largest logit of every `EVERY`-th step.

    Raises:
        ConfigError: a size is invalid, or the data is missing.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 128, "validation": 64, "test": 128, "epochs": 1, "layers": 2, "rates": 2}
    draw = torch.Generator().manual_seed(cell.seed)
    problem = {"vit": vit, "pydocs": pydocs}[cell.task](cell, options, draw)
    probe = problem.validation[0][:128]

    def train(rate: float, name: str, progress: Progress) -> Trained:
        torch.manual_seed(cell.seed)
        model = problem.make()
        watch = quest_core.Watch(model, every=EVERY)
        clip = quest_core.QKClip(model, options["qk_clip"]) if options["qk_clip"] else None
        logits: list[float] = []

        def after(step: int) -> None:
            watch.steps = step - 1  # of a cell that continues, too
            if (values := watch.step()) and (step == 1 or step % EVERY == 0):
                logits.append(values["attention/max_logit"])
            if clip:
                clip.step()

        def look(model: nn.Module) -> dict[str, float | list[float]]:
            seen, logits[:] = logits[:], []
            return {**observe(model, probe), "training_logit": seen}

        try:
            found = classify(
                cell,
                name,
                model,
                problem.train,
                {"validation": problem.validation},
                options,
                rate=rate,
                draw=torch.Generator().manual_seed(cell.seed),
                progress=progress,
                precision=options["precision"],
                watch=look,
                after=after,
            )
        except DivergedError as error:
            return Trained(problem.guess, problem.guess, error.series, diverged=True)
        model.load_state_dict(found.weights)
        return Trained(accuracy(model, *problem.test), max(found.series["validation"]), found.series)

    return over_rates(options["lowest"], options["rates"], train, progress)


def plots(rows: Any, results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """Title, caption and figure of: accuracy by learning rate, the largest logit of steps, and the values of epochs.

    Args:
        rows: one row a cell, as in results.parquet.
        results: the cells' decoded results, with what determines each cell.
    """
    from matplotlib.figure import Figure

    attentions = list(dict.fromkeys(rows["attention"]))
    rates = results[0]["details"]["rates"]
    names = [f"lr={rate:.2g}" for rate in rates]

    def drawn(axes: Any, attention: str, x: Sequence[float], lines: Sequence[Sequence[float]]) -> None:
        """The mean over seeds, and a band from the lowest to the highest, as far as all seeds go."""
        columns = list(zip(*lines, strict=False))
        x = list(x)[: len(columns)]
        colour = f"C{attentions.index(attention)}"
        axes.plot(x, [sum(own) / len(own) for own in columns], color=colour, lw=1.5, label=attention, marker=".")
        axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.16, lw=0)

    by_rate = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = by_rate.subplots()
    for attention in attentions:
        own = [cell["metrics"] for cell in results if cell["attention"] == attention]
        drawn(axes, attention, rates, [[metrics[f"accuracy/{name}"] for name in names] for metrics in own])
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test accuracy (%)")
    by_rate.legend(loc="outside upper left", ncols=4, fontsize=8)

    def over_training(keys: Sequence[str], height: float, x: Sequence[float], label: str) -> Figure:
        figure = Figure(figsize=(9.6, height * len(keys) + 0.5), layout="constrained")
        grid = figure.subplots(len(keys), len(names), squeeze=False, sharex=True, sharey="row")
        for line, key in zip(grid, keys, strict=True):
            for axes, name in zip(line, names, strict=True):
                for attention in attentions:
                    own = [c["series"].get(f"{key}/{name}", []) for c in results if c["attention"] == attention]
                    if all(own):
                        drawn(axes, attention, x, own)
                if key != "entropy" and any(v > 0 for line in axes.lines for v in line.get_ydata() if math.isfinite(v)):
                    axes.set_yscale("log")
                axes.set_title(name if key == keys[0] else "", fontsize=8)
                axes.tick_params(labelsize=7)
            line[0].set_ylabel(key.replace("_", " "), fontsize=8)
        figure.supxlabel(label, fontsize=9)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=8)
        return figure

    longest = max(len(values) for c in results for values in c["series"].values())
    in_steps = []
    if any(key.startswith("training_logit/") for c in results for key in c["series"]):
        caption = f"Of all layers and heads, in the first training batch and in every {EVERY}th."
        steps = [1, *range(EVERY, EVERY * longest, EVERY)]
        in_steps = [("Largest logit in training", caption, over_training(["training_logit"], 2.6, steps, "step"))]
    return [
        (
            "Accuracy by learning rate",
            "Test accuracy at the epoch that is best in validation. Lines are means over seeds, bands reach from the "
            "lowest to the highest. A rate that diverged counts as guessing.",
            by_rate,
        ),
        *in_steps,
        (
            "Logits and norms over training",
            "After each epoch, on a part of the validation split: the largest logit, and the means over layers and "
            "heads of the entropy of the weights in nats and of the norms of queries and keys. Lines end where a seed "
            "diverged.",
            over_training(WATCHED, 1.7, range(1, longest + 1), "epoch"),
        ),
    ]
