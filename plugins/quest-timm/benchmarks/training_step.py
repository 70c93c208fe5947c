"""The cost of a training step of a 4-layer ViT-Tiny (4 images of 224×224): stock, replaced, and by universal sites.

    OMP_NUM_THREADS=1 python plugins/quest-timm/benchmarks/training_step.py --seconds 60

The models take turns, and each row is the least processor time of one thread, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import copy
import time

import timm
import torch

import quest_core
import quest_timm  # noqa: F401  # timm accepts attention= from here on
from quest_core.hosts.universal import UniversalAdapter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    x = torch.randn(4, 3, 224, 224)
    models = {"stock": timm.create_model("vit_tiny_patch16_224", depth=4)}
    for attention in ("standard", "quest"):
        models[attention] = timm.create_model("vit_tiny_patch16_224", depth=4, attention=attention)
        host = copy.deepcopy(models["stock"])
        models[f"{attention}, universal"] = quest_core.inject(host, attention, adapter=UniversalAdapter(x))[0]
    best = dict.fromkeys(models, float("inf"))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, model in models.items():
            start = time.thread_time()
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
            best[name] = min(best[name], time.thread_time() - start)
    for name, value in best.items():
        print(f"{name:<22} {value * 1e3:8.1f} ms  {value / best['stock']:.3f}")


if __name__ == "__main__":
    main()
