"""What `quest_core.Watch` costs: `python research/scripts/watching.py vit`, or gpt, in the environment of its host.

Three copies of a model train on the same batch, a step each in turns: the stock model, one that is watched without a
measurement, and one with. A step is forward, backward, the optimizer's step and `Watch.step`, with every layer's
numbers. Processor time is counted, on one thread; ratios are those of the first quartiles, because other processes
only slow a step down. The spread is that of the halves of the rounds.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import nn

import quest_core

ROUNDS = 48


def vit() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """timm's ViT-S, an image of 197 tokens."""
    import timm

    x = torch.randn(1, 3, 224, 224)
    return timm.create_model("vit_small_patch16_224"), lambda model: model(x).logsumexp(-1).mean()


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """transformers' GPT-2 of 6 layers of width 384, a text of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 1000, (1, 256))
    sizes = GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(sizes), lambda model: model(input_ids=ids, labels=ids).loss


def main(name: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make = {"vit": vit, "gpt": gpt}[name]
    stock, loss = make()
    models = [stock, copy.deepcopy(stock), copy.deepcopy(stock)]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4) for model in models]
    watches = [None, quest_core.Watch(models[1], every=10**9), quest_core.Watch(models[2], every=1)]

    def step(i: int) -> float:
        start = time.process_time()
        optimizers[i].zero_grad()
        loss(models[i]).backward()
        optimizers[i].step()
        if (watch := watches[i]) is not None:
            watch.step()
        return time.process_time() - start

    for i in range(3):
        step(i), step(i)  # `Watch` measures the first step of a training
    times: list[list[float]] = [[], [], []]
    for number in range(ROUNDS):
        for i in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[number % 3]:
            times[i].append(step(i))
    cells = [f"{make.__doc__}"[:-1], f"{1e3 * median(times[0]):.0f} ms"]
    for i in (1, 2):
        parts = [slice(None), slice(0, ROUNDS // 2), slice(ROUNDS // 2, None)]
        whole, *halves = (quantiles(times[i][x], n=4)[0] / quantiles(times[0][x], n=4)[0] for x in parts)
        cells.append(f"{whole:.3f} ({min(halves):.3f} to {max(halves):.3f})")
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1])
