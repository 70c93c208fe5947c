"""Convert a trained ViT of timm from standard attention to QUEST, and measure its accuracy before and after.

    OMP_NUM_THREADS=1 python examples/timm/convert.py

timm's VisionTransformer (4 layers, width 64, patches of 4) is trained here from random weights on Fashion-MNIST, from
Debian's package dataset-fashion-mnist or from the folder --data. Every model is fine-tuned on the same batches; the
stock model is too, as the control.
"""

import argparse
import copy
import gzip
import statistics
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import quest_core

ATTENTION = "quest"
SEEDS, IMAGES = 3, 12000  # at least 2 seeds
EPOCHS, TUNE = 4, 1  # of the stock model, and after the conversion
BATCH = 64


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images [n, 1, 28, 28], about -1 to 2, and labels [n] of a split, "train" or "t10k"."""
    files = [folder / f"{split}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    raw = [gzip.decompress(file.read_bytes()) for file in files]
    images, labels = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in raw)
    return (images[16:].view(-1, 1, 28, 28) / 255 - 0.286) / 0.353, labels[8:].long()


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float, seed: int) -> None:
    """Train with AdamW and a linear decay to zero; images move by up to 2 pixels and are mirrored."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1) * (1 - step / steps))
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(images) // BATCH * BATCH].split(BATCH):
            moved = torch.randint(-2, 3, (2,), generator=generator).tolist()
            x = images[rows].roll(moved, (2, 3))
            x = x.flip(3) if torch.rand((), generator=generator) < 0.5 else x
            nn.functional.cross_entropy(model(x), labels[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of right labels in %."""
    model.eval()
    right = [(model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return 100 * sum(right) / len(images)


@torch.no_grad()
def head_errors(stock: nn.Module, report: quest_core.CalibrationReport, images: Tensor) -> str:
    """Return how far each head's output is from standard attention's on the same input, as a mean over all heads.

    The error is relative to how much the output varies from token to token. The best factor of each head is searched
    among powers of 1.25.
    """
    model, _ = quest_core.inject(copy.deepcopy(stock).eval(), "standard")
    calls: list[tuple[Tensor, ...]] = []
    for module in model.modules():
        if isinstance(module, quest_core.Mechanism):
            module.register_forward_hook(lambda _, given, out: calls.append((*given, out)))
    model(images)
    spreads, errors = [], []
    for (q, k, v, out), layer in zip(calls, report.layers, strict=True):
        norms = k.norm(dim=-1)  # [B, H, N]
        spreads.append(norms.std((0, 2)) / norms.mean((0, 2)))
        factors = [torch.ones(len(layer.factors)), torch.tensor(layer.factors)]
        factors += [torch.full((len(layer.factors),), 1.25**power) for power in range(-8, 5)]
        scale = (out - out.mean((0, 2), keepdim=True)).square().sum((0, 2, 3)).sqrt()  # [H]
        error = [
            (quest_core.attention(q * f[:, None, None], k, v) - out).square().sum((0, 2, 3)).sqrt() for f in factors
        ]
        found = torch.stack(error) / scale  # [factors, H]
        errors.append(torch.stack([found[0], found[1], found.amin(0)]))
    plain, calibrated, best = torch.cat(errors, 1).mean(1).tolist()
    return (
        f"error of a head's output: {plain:.2f} uncalibrated, {calibrated:.2f} calibrated, {best:.2f} with the best "
        f"factor; a head's key norms vary by {torch.cat(spreads).mean():.2f} of their mean"
    )


def run(seed: int, data: Path) -> dict[str, tuple[float, float]]:
    """Return the test accuracy of each model before and after fine-tuning."""
    (images, labels), test = read(data, "train"), read(data, "t10k")
    images, labels = images[:IMAGES], labels[:IMAGES]
    torch.manual_seed(seed)
    sizes = {"img_size": 28, "patch_size": 4, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 4}
    stock = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    train(stock, images, labels, EPOCHS, 2e-3, seed)
    batches = images[torch.randperm(len(images))[:512]].split(64)

    plain, _ = quest_core.inject(copy.deepcopy(stock), ATTENTION)
    converted, report = quest_core.calibrate(copy.deepcopy(stock), batches, ATTENTION)
    print(f"seed {seed}: {report}", flush=True)
    print(f"  {head_errors(stock, report, torch.cat(batches))}", flush=True)
    found = {}
    for name, model in (("standard", stock), ("injected, not calibrated", plain), ("calibrated", converted)):
        before = accuracy(model, *test)
        train(model, images, labels, TUNE, 5e-4, seed + 100)
        found[name] = before, accuracy(model, *test)
        print(f"  {name}: {found[name][0]:.2f} -> {found[name][1]:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    data = parser.parse_args().data
    found = [run(seed, data) for seed in range(SEEDS)]
    print("test accuracy in %, mean (standard deviation over seeds), before and after fine-tuning")
    for name in found[0]:
        columns = zip(*(each[name] for each in found), strict=True)
        print(f"{name:<26}" + "  ".join(f"{statistics.mean(x):6.2f} ({statistics.stdev(x):.2f})" for x in columns))


if __name__ == "__main__":
    main()
