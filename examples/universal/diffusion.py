"""Train a diffusion transformer of diffusers, which no adapter knows, with any attention through the universal site.

    OMP_NUM_THREADS=1 python examples/universal/diffusion.py

DiTTransformer2DModel (4 layers, width 64, patches of 4, class labels) learns to predict the noise in images of
Fashion-MNIST, from Debian's package dataset-fashion-mnist or from the folder --data. For each seed all attentions start
from the same weights and see the same images, noise and times.
"""

import argparse
import gzip
import statistics
from pathlib import Path

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from torch import Tensor, nn

import quest_core

ATTENTIONS = ("standard", "quest")  # the first is the baseline
SEEDS, STEPS, BATCH = 3, 400, 64


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images [n, 1, 28, 28] in -1..1, and labels [n] of a split, "train" or "t10k"."""
    files = [folder / f"{split}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    raw = [gzip.decompress(file.read_bytes()) for file in files]
    images, labels = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in raw)
    return images[16:].view(-1, 1, 28, 28) / 127.5 - 1, labels[8:].long()


def loss(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mean squared error of the predicted noise at random times."""
    scheduler = DDPMScheduler(1000)
    noise = torch.randn(images.shape, generator=generator)
    times = torch.randint(1000, labels.shape, generator=generator)
    given = {"hidden_states": scheduler.add_noise(images, noise, times), "timestep": times, "class_labels": labels}
    return nn.functional.mse_loss(model(**given).sample, noise)


def run(attention: str, seed: int, data: Path) -> float:
    """Return the loss on the test images after training."""
    (images, labels), test = read(data, "train"), read(data, "t10k")
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, out_channels=1, num_layers=4, norm_num_groups=1,
        sample_size=28, patch_size=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    example = {"hidden_states": images[:1], "timestep": torch.tensor([0]), "class_labels": labels[:1]}
    model, report = quest_core.inject(model, attention, example=example)
    print(f"seed {seed}: {report}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1) * (1 - step / STEPS))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # the model drops class labels
    for _ in range(STEPS):
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        loss(model, images[rows], labels[rows], generator).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        pairs = zip(test[0].split(500), test[1].split(500), strict=True)
        found = statistics.mean(loss(model, *pair, generator).item() for pair in pairs)
    print(f"  test loss {found:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    data = parser.parse_args().data
    found = {name: [run(name, seed, data) for seed in range(SEEDS)] for name in ATTENTIONS}
    baseline = found[ATTENTIONS[0]]
    print("test loss of the predicted noise: mean; difference from the first by seed")
    for name, losses in found.items():
        gaps = "  ".join(f"{one - other:+.4f}" for one, other in zip(losses, baseline, strict=True))
        print(f"{name:<12}{statistics.mean(losses):.4f}  {gaps}")


if __name__ == "__main__":
    main()
