"""time/fairseq: a training step (forward, loss, backward, Adam) and decoding of a language model of fairseq."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import build_model
from omegaconf import open_dict
from torch import Tensor

from quest_suites.contract import Cell, Progress, Result
from quest_suites.timing import DEVICE, Step, against_stock, training_step

from .tasks import configuration

WIDE = {"decoder_embed_dim": 256, "decoder_input_dim": 256, "decoder_output_dim": 256, "decoder_ffn_embed_dim": 1024}
DECODED = 64  # tokens of the task decode, one after another


def run_time(cell: Cell, progress: Progress) -> Result:
    """Time a step of each of two models in turns; see `quest_suites.timing.against_stock`.

    The words are few, because the loss over WikiText-103's 267,744 would hide what the attention takes.
    """
    words = Dictionary()
    for number in range(10_000 - len(words)):
        words.add_symbol(str(number))
    decodes = cell.task == "decode"
    config = "pydocs" if decodes else cell.task
    length = DECODED if decodes else int(configuration(config).task.tokens_per_sample)
    shape = 1 if cell.smoke else 4, length + 1
    generator = torch.Generator().manual_seed(cell.seed)
    tokens = torch.randint(words.nspecial, len(words), shape, generator=generator).to(DEVICE)  # [B, N + 1]

    def make(attention: str | None) -> Step:
        sizes = configuration(config).model
        with open_dict(sizes):
            if decodes:
                sizes.update(WIDE, decoder_layers=4)
            if attention is None:
                sizes._name = "transformer_lm"
                del sizes.attention
            else:
                sizes.attention = attention
            if cell.smoke:
                sizes.decoder_layers = 2
        model = build_model(sizes, SimpleNamespace(source_dictionary=words, target_dictionary=words)).to(DEVICE).train()

        @torch.no_grad()
        def decode() -> None:
            state: dict[str, Any] = {}
            for end in range(1, length + 1):
                model(tokens[:, :end], incremental_state=state)

        def loss() -> Tensor:
            scores = model(tokens[:, :-1], src_lengths=None)[0]  # [B, N, words]
            return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

        if decodes:
            model.eval()
            return decode
        return training_step(model, loss, torch.optim.Adam(model.parameters(), lr=0.00025))

    return against_stock(cell, progress, make)
