"""What `quest_core.Watch` costs: `python research/scripts/watching.py vit`, or gpt, in the environment of its host.

Three copies of a model train on the same batch, a step each in turns: the stock model, one that is watched without a
measurement, and one with. A step is forward, backward, the optimizer's step and `Watch.step`, with every layer's
numbers. Processor time is counted on one thread; each number is the median, and the middle half, over the turns.

A measured step is compared at full size. Every step costs a fixed time per layer, which the noise of a full step hides,
so it is measured with five tokens. The last column is the sum of both for `every=100`.
"""

import copy
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import nn

import quest_core
from quest_suites.timing import in_turns

ROUNDS = 40


def vit() -> tuple[nn.Module, Callable[[nn.Module, bool], torch.Tensor]]:
    """timm's ViT-S, an image of 197 tokens"""
    import timm

    model = timm.create_model("vit_small_patch16_224", dynamic_img_size=True)
    x = torch.randn(1, 3, 224, 224)
    return model, lambda model, full: model(x if full else x[..., :32, :32]).logsumexp(-1).mean()


def gpt() -> tuple[nn.Module, Callable[[nn.Module, bool], torch.Tensor]]:
    """transformers' GPT-2 of 6 layers of width 384, a text of 256 tokens"""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 1000, (1, 256))
    sizes = GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0)

    def loss(model: nn.Module, full: bool) -> torch.Tensor:
        given = ids if full else ids[:, :5]
        found: torch.Tensor = model(input_ids=given, labels=given).loss
        return found

    return GPT2LMHeadModel(sizes), loss


def main(name: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make = {"vit": vit, "gpt": gpt}[name]
    stock, loss = make()
    models = [stock, copy.deepcopy(stock), copy.deepcopy(stock)]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4) for model in models]
    watches = [None, quest_core.Watch(models[1], every=10**9), quest_core.Watch(models[2], every=1)]

    def step(i: int, full: bool) -> float:
        start = time.process_time()
        optimizers[i].zero_grad()
        loss(models[i], full).backward()
        optimizers[i].step()
        if (watch := watches[i]) is not None:
            watch.step()
        return 1e3 * (time.process_time() - start)  # ms

    steps = {(i, full): lambda _, i=i, full=full: step(i, full) for full in (True, False) for i in range(3)}
    taken = in_turns(steps, ROUNDS)  # `Watch` measures the first step of a training, which does not count
    low, ratio, high = quantiles((y / x for x, y in zip(taken[1, True], taken[2, True], strict=True)), n=4)
    least, fixed, most = quantiles((y - x for x, y in zip(taken[0, False], taken[1, False], strict=True)), n=4)
    full = median(taken[0, True])
    cost = 100 * ((ratio - 1) / 100 + fixed / full)
    print(
        f"| {make.__doc__} | {full:.0f} ms | {ratio:.2f} ({low:.2f} to {high:.2f}) | "
        f"{fixed:.1f} ms ({least:.1f} to {most:.1f}) | {cost:.2f} % |"
    )


if __name__ == "__main__":
    main(sys.argv[1])
