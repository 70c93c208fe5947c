"""aft/causal: attention-free layers that predict the next byte or pixel (AFT, tables 2 and 4 to 6).

A task names the data and the length. "text=256" is Python's documentation topics as bytes, cut into pieces of 256
bytes; the last tenth is the test, the tenth before it the validation. "image=14" is Fashion-MNIST averaged to 14×14
pixels of 256 levels, row by row. The model is a causal pre-norm Transformer with learned positions; only its attention
changes. The epoch with the best validation is kept, and its bits per byte or pixel on the test are reported.

Windows are compared by attentions, such as ``aft-simple,aft-local(window=8),aft-local(window=32)``.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.errors import ConfigError
from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import time_in_turns, training_step

from .images import Block, Split, read
from .language import TOPICS, bits, pieces, token_loss
from .training import fit

LEVELS = 256
"""Values of a byte and of a pixel; the token after them starts an image."""


class Decoder(nn.Module):
    """Predict the next token: tokens [B, T] -> logits [B, T, 256]."""

    def __init__(self, attention: str, length: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = options["width"], options["heads"]
        self.token = nn.Embedding(LEVELS + 1, width)
        self.positions = nn.Parameter(torch.empty(length, width))  # [T, E]
        self.blocks = nn.Sequential(*(Block(width, heads, attention, causal=True) for _ in range(options["layers"])))
        quest_core.chain(self)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, LEVELS)
        for start in (self.token.weight, self.positions):
            nn.init.normal_(start, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.out(self.norm(self.blocks(x)))
        return logits


def run(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one attention with one seed, and compare its training step with that of standard attention.

    Returns:
        Metrics ``bits`` per byte or pixel of the test, ``train bits`` of the last epoch, and ``time of standard`` and
        ``memory of standard``, ratios of a training step. Series ``train_loss`` (nats) and ``validation`` (bits).
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"images": 32, "epochs": 1, "layers": 1, "rounds": 2, "tokens": 512}
    training, validation, test = splits(cell, options)
    if cell.smoke:
        training, validation, test = ((x[:8], y[:8]) for x, y in (training, validation, test))
    batch = max(1, options["tokens"] // training[0].shape[1])

    def build(attention: str) -> Decoder:
        torch.manual_seed(cell.seed)
        return Decoder(attention, training[0].shape[1], options)

    model = build(cell.attention)
    found = fit(
        cell,
        "training",
        model,
        lambda picked: token_loss(model, (training[0][picked], training[1][picked])),
        len(training[0]),
        {**options, "batch": batch},
        measure=lambda: {"validation": bits(model, validation)},
        progress=progress,
        select="validation",
        best=min,
    )
    if found.diverged:
        return Result({"bits": math.nan})
    model.load_state_dict(found.weights)
    curves = found.series
    with torch.no_grad():
        metrics = {"bits": bits(model, test), "train bits": curves["train_loss"][-1] / math.log(2)}
    some = (training[0][:batch], training[1][:batch])
    stock = build("standard")
    steps = (training_step(timed.train(), partial(token_loss, timed, some)) for timed in (stock, model))
    taken = time_in_turns(*steps, rounds=options["rounds"])
    ratios = {name: taken.metrics.get(f"{name} of stock") for name in ("time", "memory")}
    metrics |= {f"{name} of standard": ratio for name, ratio in ratios.items() if ratio is not None}
    return Result(metrics, curves, {"parameters": sum(p.numel() for p in model.parameters())})


def splits(cell: Cell, options: Mapping[str, Any]) -> tuple[Split, Split, Split]:
    """Return training, validation and test of the cell's task."""
    kind, _, number = cell.task.partition("=")
    if kind == "text":
        text = torch.frombuffer(bytearray(TOPICS.encode()), dtype=torch.uint8)
        tenth = len(text) // 10
        parts = text.long().split([len(text) - 2 * tenth, tenth, tenth])
        return tuple(pieces(part, int(number)) for part in parts)  # type: ignore[return-value]
    side, count = int(number), options["images"]
    if 28 % side:
        raise ConfigError(f"task {cell.task} averages 28×28 pixels; choose a divisor of 28: 1, 2, 4, 7, 14 or 28")
    images, _ = read(cell.data, "train")
    held_out, _ = read(cell.data, "t10k")
    draw = torch.Generator().manual_seed(cell.seed)
    chosen = images[torch.randperm(len(images), generator=draw)[: count + count // 4]]
    return pixels(chosen[:count], side), pixels(chosen[count:], side), pixels(held_out[: count // 2], side)


def pixels(images: Tensor, side: int) -> Split:
    """Average images [n, 28, 28] in 0..1 to side×side levels; an image follows the token 256."""
    levels = (255 * F.adaptive_avg_pool2d(images, side)).round().long().flatten(1)  # [n, side²]
    return torch.cat([torch.full_like(levels[:, :1], LEVELS), levels[:, :-1]], 1), levels
