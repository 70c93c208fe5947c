"""A small causal language model and its texts, which several suites train on."""

import math
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.errors import ConfigError

from .images import Block, Split, start

CONTEXT = 64
"""Tokens that `LanguageModel` sees."""
PART = 16384
"""Tokens of an evaluation that are held at a time."""
TOPICS = "\n".join(topics[name] for name in sorted(topics))
"""Python's documentation topics, so that nothing is downloaded."""


class LanguageModel(nn.Module):
    """A causal pre-norm Transformer over tokens."""

    tokens: nn.Module  # tokens [B, N] -> features [B, N, E]
    out: nn.Module  # features [B, N, E] -> logits [B, N, vocabulary]

    def __init__(self, attention: str, vocabulary: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = options["width"], options["heads"]
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention, causal=True) for _ in range(options["layers"])))
        quest_core.chain(self)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        start(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, N] -> logits [B, N, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.out(self.norm(self.blocks(x)))
        return logits


def heads_of(task: str, width: int) -> int:
    """Return the number of heads of a model of this width if a task such as "D=16" gives each 16 features."""
    features = int(task.removeprefix("D="))
    if width % features:
        raise ConfigError(f"option width is {width}, which heads of {features} features do not divide")
    return width // features


def token_loss(model: nn.Module, batch: Split) -> Tensor:
    """Return the mean cross-entropy in nats a token, of tokens [B, N] and the next ones [B, N]."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def bits(model: nn.Module, data: Split) -> float:
    """Return the mean bits a token of all samples, by the model in evaluation."""
    part = max(1, PART // data[0].shape[1])
    both = zip(data[0].split(part), data[1].split(part), strict=True)
    total = sum(token_loss(model, (x, y)).item() * y.numel() for x, y in both)
    return total / data[1].numel() / math.log(2)


def corpus(text: str = TOPICS) -> tuple[Tensor, Tensor, int]:
    """Return the characters of the training text and of the held-out last tenth, and the size of the vocabulary."""
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(number)


def windows(text: Tensor, count: int, length: int, draw: torch.Generator) -> Split:
    """Draw pieces of a text [L]: tokens [count, length] and the next ones [count, length]."""
    first = torch.randint(len(text) - length, (count, 1), generator=draw)
    drawn = text[first + torch.arange(length + 1)]
    return drawn[:, :-1], drawn[:, 1:]


def pieces(text: Tensor, length: int) -> Split:
    """Cut a text [L] into pieces: tokens [n, length] and the next ones [n, length]; the rest is left out."""
    n = (len(text) - 1) // length
    if not n:
        raise ConfigError(f"the text has {len(text)} bytes, fewer than a piece of {length} needs; shorten it")
    return text[: n * length].view(n, length), text[1 : n * length + 1].view(n, length)
