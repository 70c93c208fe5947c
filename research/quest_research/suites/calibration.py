"""calibration/pydocs: does calibration help a pretrained model that is fine-tuned with QUEST?

A small character model of Python's documentation topics is pretrained with standard attention. Copies are fine-tuned on
the same batches in the same order: with standard attention; with QUEST by `quest_core.inject`; and with QUEST by
`quest_core.calibrate`. Nothing is downloaded.
"""

import copy
import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import quest_core
from quest_core.tools.calibration import refuse_uncalibratable
from quest_suites.contract import Cell, Progress, Result, load_state, part, save_state

from .images import Split
from .language import corpus, token_loss, windows

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 3, 4, 64, 96, 16
PRETRAIN_RATE = 3e-3


class LanguageModel(nn.Module):
    """A causal pre-norm transformer over characters: tokens [B, N] -> logits [B, N, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        logits: Tensor = self.out(self.encoder(x, self.mask, is_causal=True))
        return logits


def train(
    model: nn.Module, text: Tensor, held_out: list[Split], steps: int, rate: float, seed: int, progress: Progress
) -> dict[int, float]:
    """Train with AdamW, a warm-up over a twentieth of the steps and cosine decay; return held-out losses by step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))),
    )
    asked = {0, 1, 2, 5, 10, 20, 40, 80, 160, 240, *range(320, steps, 160), steps}
    losses: dict[int, float] = {}
    for step in range(steps + 1):
        if step in asked:
            model.eval()
            with torch.no_grad():
                losses[step] = statistics.fmean(token_loss(model, batch).item() for batch in held_out)
            model.train()
        if step < steps:
            optimizer.zero_grad()
            token_loss(model, windows(text, BATCH, CONTEXT, generator)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress((step + 1) / steps, f"step {step + 1}")
    return losses


def run(cell: Cell, progress: Progress) -> Result:
    """Pretrain with standard attention, then fine-tune with the cell's attention, calibrated and not.

    Returns:
        Metrics ``gain`` (held-out loss without calibration less that with it, after fine-tuning, in nats a character;
        0 for standard attention, which needs none), ``first gain`` (before the first step) and ``loss``; series
        ``loss`` and ``loss without calibration`` at the steps in the details.
    """
    config = quest_core.AttentionConfig.parse(cell.attention)
    stock = config.is_standard
    if not stock:
        refuse_uncalibratable(config)
    pretrain, finetune = (4, 4) if cell.smoke else (cell.options["pretrain"], cell.options["finetune"])
    arms = ["loss"] if stock else ["loss", "loss without calibration"]
    text, rest, vocabulary = corpus()
    held_out = [
        windows(rest, BATCH, CONTEXT, torch.Generator().manual_seed(1000 + i)) for i in range(2 if cell.smoke else 12)
    ]
    shares = 1 + len(arms)
    torch.manual_seed(cell.seed)
    model = LanguageModel(vocabulary)
    curves: dict[str, dict[int, float]] = {}
    details: dict[str, Any] = {}
    if state := load_state(cell):
        model.load_state_dict(state["model"])
        curves, details = state["curves"], state["details"]
    else:
        curves["pretraining"] = train(
            model, text, held_out, pretrain, PRETRAIN_RATE, cell.seed, part(progress, 0, shares)
        )
        save_state(cell, {"model": model.state_dict(), "curves": curves, "details": details})
    generator = torch.Generator().manual_seed(500 + cell.seed)
    samples = [windows(text, BATCH, CONTEXT, generator)[0] for _ in range(4)]
    for place, arm in enumerate(arms, 1):
        if arm in curves:
            continue
        tuned: nn.Module = copy.deepcopy(model)
        if not stock and arm == "loss":
            tuned, made = quest_core.calibrate(tuned, samples, config)
            details["factors"] = {layer.path: layer.factors for layer in made.layers}
            details |= {"change": made.calibrated, "change without calibration": made.uncalibrated}
        elif not stock:
            tuned, _ = quest_core.inject(tuned, config)
        own = part(progress, place, shares)
        curves[arm] = train(tuned, text, held_out, finetune, cell.options["rate"], 100 + cell.seed, own)
        save_state(cell, {"model": model.state_dict(), "curves": curves, "details": details})
    plain = curves[arms[-1]]
    return Result(
        {
            "gain": plain[finetune] - curves["loss"][finetune],
            "first gain": plain[0] - curves["loss"][0],
            "loss": curves["loss"][finetune],
        },
        {arm: list(curves[arm].values()) for arm in arms},
        {**details, "pretrained": curves["pretraining"][pretrain], "steps": list(curves["loss"])},
    )
