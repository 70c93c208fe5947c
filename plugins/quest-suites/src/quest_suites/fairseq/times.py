"""time/fairseq: a training step of a language model (forward, loss, backward, Adam), against transformer_lm."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import build_model
from omegaconf import open_dict
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import beside_stock

from .tasks import configuration

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.beside_stock`.

    The words are few, because the loss over WikiText-103's 267,744 would hide what the attention takes.
    """
    options = {**cell.options, **({"rounds": 2, "batch": 1} if cell.smoke else {})}
    words = Dictionary()
    for number in range(10_000 - len(words)):
        words.add_symbol(str(number))
    cfg = configuration(cell.task)
    generator = torch.Generator().manual_seed(cell.seed)
    shape = options["batch"], int(cfg.task.tokens_per_sample) + 1
    tokens = torch.randint(words.nspecial, len(words), shape, generator=generator).to(DEVICE)
    steps = [partial(step, *build(cell, words, attention), tokens) for attention in (None, cell.attention)]
    return beside_stock(*steps, rounds=options["rounds"], progress=progress)


def build(cell: Cell, words: Dictionary, attention: str | None) -> tuple[Any, torch.optim.Optimizer]:
    """Return a language model of a shipped yaml and its optimizer; stock without `attention`."""
    model = configuration(cell.task).model
    with open_dict(model):
        if attention is None:
            model._name = "transformer_lm"
            del model.attention
        else:
            model.attention = attention
        if cell.smoke:
            model.decoder_layers = 1
    torch.manual_seed(cell.seed)
    made = build_model(model, SimpleNamespace(source_dictionary=words, target_dictionary=words))
    return made.to(DEVICE).train(), torch.optim.Adam(made.parameters(), lr=0.00025)


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Train on one batch of tokens [B, N + 1]."""
    scores = model(tokens[:, :-1], src_lengths=None)[0]  # [B, N, words]
    F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
