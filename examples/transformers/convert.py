"""Convert a trained GPT-2 from standard attention to QUEST, and measure its perplexity before and after.

    OMP_NUM_THREADS=1 python examples/transformers/convert.py

The model is a small GPT-2 on bytes, trained here from random weights on Python's own documentation (pydoc_data.topics,
in the standard library). Every model is fine-tuned on the same batches; the stock model is too, as the control.
"""

import argparse
import copy
import math
import statistics
import tempfile
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import quest_core
import quest_transformers  # noqa: F401  registers the name

ATTENTION = "quest"
STEPS, TUNE = 800, 150  # updates of the stock model, and after the conversion
LENGTH, BATCH, PIECE = 64, 16, 2048


def text() -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes: every tenth piece of the text is held out."""
    data = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    pieces = data.split(PIECE)
    return torch.cat([x for i, x in enumerate(pieces) if i % 10]), torch.cat(pieces[::10])


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    """Return random windows [BATCH, LENGTH]."""
    starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts])


def train(model: nn.Module, data: Tensor, steps: int, rate: float, seed: int) -> None:
    """Train with AdamW and a linear decay to zero."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1) * (1 - step / steps))
    model.train()
    for _ in range(steps):
        ids = batch(data, generator)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def perplexity(model: nn.Module, data: Tensor) -> float:
    """Return the perplexity per byte over all whole windows."""
    model.eval()
    windows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    losses = [model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in windows.split(64)]
    return math.exp(sum(losses) / len(windows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="trainings to average over, at least 2")
    seeds = parser.parse_args().seeds
    data, held_out = text()
    found = [run(seed, data, held_out) for seed in range(seeds)]
    print("perplexity per byte on held-out text, mean (spread over seeds), before and after fine-tuning")
    for name in found[0]:
        columns = zip(*(each[name] for each in found), strict=True)
        print(f"{name:<26}" + "  ".join(f"{statistics.mean(x):7.3f} ({statistics.stdev(x):.3f})" for x in columns))


def run(seed: int, data: Tensor, held_out: Tensor) -> dict[str, tuple[float, float]]:
    """Return the perplexity of each model before and after fine-tuning."""
    torch.manual_seed(seed)
    stock = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    train(stock, data, STEPS, 3e-3, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    calibration = [batch(data, generator) for _ in range(8)]

    plain, _ = quest_core.inject(copy.deepcopy(stock), ATTENTION)
    converted, report = quest_core.calibrate(copy.deepcopy(stock), calibration, ATTENTION)
    print(f"seed {seed}: {report}", flush=True)
    found = {}
    for name, model in (("standard", stock), ("injected, not calibrated", plain), ("converted", converted)):
        before = perplexity(model, held_out)
        train(model, data, TUNE, 1e-3, seed + 2)
        found[name] = before, perplexity(model, held_out)

    with tempfile.TemporaryDirectory() as folder:
        converted.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.config.attention == ATTENTION
        assert math.isclose(perplexity(again, held_out), found["converted"][1], rel_tol=1e-5)
    return found


if __name__ == "__main__":
    main()
