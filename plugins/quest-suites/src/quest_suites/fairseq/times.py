"""time/fairseq: a training step of a language model (forward, loss, backward, Adam), against transformer_lm."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import build_model
from omegaconf import open_dict
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

from .tasks import configuration


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`.

    The words are few, because the loss over WikiText-103's 267,744 would hide what the attention takes.
    """
    words = Dictionary()
    for number in range(10_000 - len(words)):
        words.add_symbol(str(number))
    shape = 1 if cell.smoke else cell.options["batch"], int(configuration(cell.task).task.tokens_per_sample) + 1
    generator = torch.Generator().manual_seed(cell.seed)
    tokens = torch.randint(words.nspecial, len(words), shape, generator=generator).to(DEVICE)  # [B, N + 1]

    def make(attention: str | None) -> Step:
        sizes = configuration(cell.task).model
        with open_dict(sizes):
            if attention is None:
                sizes._name = "transformer_lm"
                del sizes.attention
            else:
                sizes.attention = attention
            if cell.smoke:
                sizes.decoder_layers = 1
        model = build_model(sizes, SimpleNamespace(source_dictionary=words, target_dictionary=words)).to(DEVICE).train()

        def loss() -> Tensor:
            scores = model(tokens[:, :-1], src_lengths=None)[0]  # [B, N, words]
            return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

        return training_step(model, loss, torch.optim.Adam(model.parameters(), lr=0.00025))

    return against_stock(cell, progress, make)
