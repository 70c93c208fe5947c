"""Seconds and memory of a training step of Segmenter: stock mmsegmentation, `standard` and others through the plugin.

    OMP_NUM_THREADS=1 python benchmarks/training_step.py [--model t] [--size 512] [--rounds 7] [--attention quest]

Each round runs one step (forward, loss, backward, SGD) of every variant in turn, in an order that rotates, so that a
change of the machine's load meets all alike. Printed are the median ratio to the stock model of the same round and its
quartiles. On a CPU the time is that of the processor, not of the clock; on a GPU it is that of the clock. Memory is the
peak of a process of its own that takes two steps, less what it held before the first: resident on a CPU, allocated on a
GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

import quest_mmseg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = Path(quest_mmseg.__file__).parent / "configs"


def build(variant: str, options: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    config = Config.fromfile(CONFIGS / f"segmenter_vit-{options.model}_mask_standard_1xb8-160k_ade20k-512x512.py")
    if variant == "stock":
        config.model.type = "EncoderDecoder"
        del config.model.attention
    else:
        config.model.attention = variant
    config.model.backbone.img_size = (options.size, options.size)
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()
    return model.to(DEVICE).train(), torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def batch(options: argparse.Namespace) -> tuple[torch.Tensor, list[SegDataSample]]:
    generator = torch.Generator().manual_seed(0)
    shape = (options.size, options.size)
    images = torch.randn(options.batch, 3, *shape, generator=generator).to(DEVICE)
    labels = [torch.randint(150, (1, *shape), generator=generator).to(DEVICE) for _ in range(options.batch)]
    return images, [SegDataSample(gt_sem_seg=PixelData(data=x), metainfo={"img_shape": shape}) for x in labels]


def step(model: Any, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, list[SegDataSample]]) -> float:
    clock = time.process_time if DEVICE == "cpu" else time.perf_counter
    started = clock()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss = model.loss(*data)["decode.loss_ce"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def memory(variant: str, options: argparse.Namespace) -> float:
    """MiB, in this process."""
    model, optimizer = build(variant, options)
    data = batch(options)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(2):
        step(model, optimizer, data)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ((torch.cuda.max_memory_allocated() if DEVICE == "cuda" else after) - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="t", choices=["t", "s"], help="ViT-T/16 or ViT-S/16")
    parser.add_argument("--size", type=int, default=512, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=1, help="images a step")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each variant")
    parser.add_argument("--attention", default="quest", help="further mechanisms, separated by spaces")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    init_default_scope("mmseg")
    logging.getLogger("mmengine").setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, options)))
        return
    names = ["stock", "standard", *options.attention.split()]
    command = [sys.executable, __file__, "--model", options.model, "--size", str(options.size)]
    command += ["--batch", str(options.batch), "--memory-of"]
    mib = {
        name: json.loads(
            subprocess.run([*command, name], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        for name in names
    }
    made = {name: build(name, options) for name in names}
    data = batch(options)
    for pair in made.values():
        step(*pair, data)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(options.rounds):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(step(*made[name], data))
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} thread"
    print(f"Segmenter ViT-{options.model.upper()}/16, {options.size}x{options.size}, batch {options.batch}, "
          f"{options.rounds} steps each, torch {torch.__version__}, {device}")  # fmt: skip
    print("| attention | seconds a step | of stock (quartiles) | memory, MiB | of stock |\n|---|---:|---:|---:|---:|")
    for name, times in seconds.items():
        ratios = [ours / stock for ours, stock in zip(times, seconds["stock"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {name} | {statistics.median(times):.3f} | {middle:.3f} ({low:.3f} to {high:.3f}) | {mib[name]:.0f} | "
              f"{mib[name] / mib['stock']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
