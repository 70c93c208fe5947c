"""How many directions trained logits have: python research/scripts/logit_rank.py SHAKESPEARE [ATTENTION ...]

Trains the model of widths/text once per width of a head, at the rate 0.003 with seed 0, and prints means over layers,
heads and 64 pieces of validation text. Ranks are of the matrix [queries, keys] of a piece, less the mean of each row,
which the softmax ignores: `numerical` counts the singular values above a hundredth of the largest, `effective` is the
exponential of the entropy of their shares (Roy and Vetterli, 2007). `weights` is the latter of the causal weights.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quest_core.mechanism import Mechanism
from quest_research.suites.language import LanguageModel, token_loss
from quest_research.suites.suites import WIDTHS_OPTIONS
from quest_research.suites.training import fit
from quest_research.suites.widths import texts
from quest_suites.contract import Cell, observe


def effective(values: Tensor) -> float:
    """Return the mean effective rank of matrices with these singular values [..., N]."""
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp().mean().item()


def main(data: str, *attentions: str) -> None:
    print("attention | D | numerical | effective | weights | entropy", flush=True)
    for attention in attentions or ("standard", "quest"):
        for head in (4, 8, 16, 64):
            options = {option["name"]: option["default"] for option in WIDTHS_OPTIONS}
            options |= {"heads": options["width"] // head, "rate": 0.003, "epochs": 1}
            cell = Cell("widths/text", f"D={head}", attention, 0, False, Path(data), options, Path(tempfile.mkdtemp()))
            train, validation, _, vocabulary = texts(cell, options)
            torch.manual_seed(0)
            model = LanguageModel(attention, vocabulary, options)

            def mean(picked: Tensor, model: LanguageModel = model, train: tuple[Tensor, Tensor] = train) -> Tensor:
                return token_loss(model, (train[0][picked], train[1][picked]))

            fit(cell, "training", model, mean, len(train[0]), options, measure=dict, progress=lambda share, text: None)
            probe = validation[0][:64]
            found: list[Tensor] = []
            for module in model.modules():
                if isinstance(module, Mechanism):
                    module.register_forward_hook(
                        lambda own, given, _, found=found: found.append(own.logits(*given[:2]))
                    )
            with torch.no_grad():
                model(probe)
            logits = torch.stack(found)  # [layers, B, H, N, N]
            values = torch.linalg.svdvals(logits - logits.mean(-1, keepdim=True))
            numerical = (values > values[..., :1] / 100).sum(-1).double().mean().item()
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            weights = effective(torch.linalg.svdvals(logits.masked_fill(future, -torch.inf).softmax(-1)))
            numbers = (numerical, effective(values), weights, observe(model, probe)["entropy"])
            print(" | ".join([attention, str(head), *(f"{number:.2f}" for number in numbers)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
