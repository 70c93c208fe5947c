"""Suite recall/mqar: multi-query associative recall (Zoology, arXiv 2312.04927), on which in-context learning rests.

A sequence begins with pairs of a key and a value, none of them twice. Later each key comes once more, and the model
must name its value there. As in the paper, the distances are drawn from a power law, and the other places hold zeros;
our vocabulary, width and length are smaller. A token also sees the one before it, so one block can solve the task: all
that is left to learn is to find a key among the others.

A task "D=16" gives the heads 16 features each; the width of the model stays. A cell trains one attention at each of
several learning rates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quest_core.errors import ConfigError
from quest_suites.contract import Cell, Progress, Result, observe, over_rates

from .images import IGNORED, Split, at_rates
from .language import CONTEXT, LanguageModel, heads_of

POWER = 0.01


class WithTheOneBefore(nn.Module):
    """A convolution of width 2: adds to each token a projection of the one before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, E] -> [B, N, E]."""
        return x + F.pad(self.before(x), (0, 0, 1, 0))[:, :-1]


class RecallModel(LanguageModel):
    """A language model whose tokens also see the one before them."""

    def __init__(self, attention: str, options: Mapping[str, Any]) -> None:
        super().__init__(attention, options["vocabulary"], options)
        self.tokens = nn.Sequential(self.tokens, WithTheOneBefore(options["width"]))


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with heads of one width and one seed at every learning rate; see `learn`."""
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 64, "test": 16, "epochs": 1, "rates": 2}
    options["heads"], pairs = heads_of(cell.task, options["width"]), options["pairs"]
    if 4 * pairs > CONTEXT:
        raise ConfigError(f"option pairs is {pairs}; a sequence of {CONTEXT} tokens holds at most {CONTEXT // 4}")
    if options["vocabulary"] < 2 * (pairs + 1):
        raise ConfigError(f"option vocabulary is {options['vocabulary']}; {pairs} pairs need {2 * (pairs + 1)} or more")
    draw = torch.Generator().manual_seed(cell.seed)
    splits = [sequences(options[count], pairs, options["vocabulary"], draw) for count in ("train", "test", "test")]
    return learn(cell, options, splits, lambda: RecallModel(cell.attention, options), progress)


def learn(
    cell: Cell, options: Mapping[str, Any], splits: Sequence[Split], make: Callable[[], nn.Module], progress: Progress
) -> Result:
    """Train a model at every learning rate.

    Args:
        options: of the training; those of the cell, or of its smoke test.
        splits: for training, validation and test: tokens [count, N], and the answers at the places that ask, else
            IGNORED.
        make: returns a model: tokens [B, N] -> logits [B, N, vocabulary].

    Returns:
        What `over_rates` returns, the accuracies being those of the answers, with series of each epoch:
        ``validation/lr=R``, ``entropy/lr=R`` of the weights (nats), ``max_logit/lr=R`` and so on.
    """
    watch = {"watch": lambda model: observe(model, splits[1][0][:64])}
    return over_rates(at_rates(cell, options, options["lowest"], splits, make, lambda model: watch, 0.0, progress))


def sequences(count: int, pairs: int, vocabulary: int, draw: torch.Generator) -> Split:
    """Return tokens [count, N], and at the places of the queries the values that belong there, else IGNORED."""
    half = vocabulary // 2
    keys = 1 + torch.rand(count, half - 1, generator=draw).argsort(1)[:, :pairs]
    values = half + torch.rand(count, half, generator=draw).argsort(1)[:, :pairs]
    gaps = torch.arange(1, CONTEXT // 2 - pairs + 1) ** (POWER - 1)
    places = 2 * pairs + 2 * torch.multinomial(gaps.expand(count, -1), pairs, generator=draw)
    tokens, wanted = torch.zeros(count, CONTEXT, dtype=torch.long), torch.full((count, CONTEXT), IGNORED)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], -1).flatten(1)
    return tokens.scatter(1, places, keys), wanted.scatter(1, places, values)
