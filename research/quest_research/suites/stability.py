"""Suite stability/rates: which learning rates a model survives, as in QUEST's figure A6 and sensitivity experiments.

A cell trains one attention from the same weights at each of several learning rates, half a decade apart. A rate at
which a loss is not finite has diverged: it stays in the result, with the accuracy of guessing. Nothing clips gradients.

Task "vit" is the Vision Transformer of images/*, on Fashion-MNIST. Task "pydocs" is a causal model of the characters
of Python's documentation topics; its accuracy is that of the next character in held-out text.

Warm-up, depth, precision and QK-clip are options, for example `--set warmup=0,100 --set layers=4,12`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import quest_core
from quest_suites.contract import Cell, Progress, Result, observe, over_rates

from . import images
from .images import Split, at_rates
from .language import CONTEXT, LanguageModel, corpus, windows

EVERY = 10
"""Steps from one measurement of the largest logit in training to the next; the first step is measured too."""


Problem: TypeAlias = tuple[Split, Split, Split, Callable[[], nn.Module], float]
"""Training, validation and test; what builds the model; and the accuracy of guessing, in %."""


def vit(cell: Cell, options: Mapping[str, Any], draw: torch.Generator) -> Problem:
    """Return the Vision Transformer and its images."""
    data = images.load(cell.data, options, draw)
    make = partial(images.build, cell.attention, data, options)
    return data.train, data.validation, data.test, make, 100 / data.classes


def pydocs(cell: Cell, options: Mapping[str, Any], draw: torch.Generator) -> Problem:
    """Return the language model and its text; the last tenth of the text is for validation and test."""
    text, rest, vocabulary = corpus()
    half, device = len(rest) // 2, "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(of: Tensor, count: int) -> Split:
        tokens, following = windows(of, count, CONTEXT, draw)
        return tokens.to(device), following.to(device)

    return (
        drawn(text, options["train"]),
        drawn(rest[:half], options["validation"]),
        drawn(rest[half:], options["test"]),
        lambda: LanguageModel(cell.attention, vocabulary, options).to(device),
        100 / vocabulary,
    )


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with one seed at every learning rate.

    Returns:
        What `over_rates` returns, with series ``train_loss/lr=R`` and so on, also for the values of `observe`, and
        ``training_logit``, the largest logit of every `EVERY`-th step.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 128, "validation": 64, "test": 128, "epochs": 1, "layers": 2, "rates": 2}
    draw = torch.Generator().manual_seed(cell.seed)
    *splits, make, guess = {"vit": vit, "pydocs": pydocs}[cell.task](cell, options, draw)
    probe = splits[1][0][:128]

    def how(model: nn.Module) -> dict[str, Any]:
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

        same = torch.Generator().manual_seed(cell.seed)  # the order of samples
        return {"draw": same, "precision": options["precision"], "watch": look, "after": after}

    return over_rates(at_rates(cell, options, options["lowest"], splits, make, how, guess, progress))
