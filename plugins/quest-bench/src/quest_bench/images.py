"""Suites images/*: a small Vision Transformer that classifies images, at one learning rate for each task.

The model is a pre-norm ViT (Dosovitskiy et al., 2021) whose tokens are averaged before the classifier. All Linear
weights and the positions start from a normal distribution with standard deviation 0.02, truncated at two standard
deviations, and all biases at 0. AdamW, a cosine schedule that starts at the full rate and ends at 0, no warm-up
unless asked for, no augmentation, no dropout, no clipping of gradients.

A part of the training images is held out. The reported test accuracy is that of the epoch with the best accuracy on
these validation images; the test images choose nothing. A run whose loss is not finite ends, and counts as diverged.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.benchmarks import Cell, Progress, Result, load_state, save_state
from quest_core.errors import ConfigError
from quest_core.projections import Projected

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
CLASSES = 10
PROBE = 512
"""Validation images on which logits and norms are measured."""


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then an MLP of four times the width."""

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = quest_core.Attention(width, heads, attention)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, E] -> [B, N, E]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Classify square grey images.

    Args:
        attention: the attention of every block.
        size: pixels a side.
        patch: pixels a side of a patch; `size` is a multiple.
        width: features E of a token.
        layers: blocks.
        heads: attention heads of a block.
    """

    def __init__(self, attention: str, *, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patch = patch
        self.embedding = nn.Linear(patch * patch, width)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, width))  # [N, E]
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        quest_core.chain(self)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)
        nn.init.trunc_normal_(self.positions, std=0.02, a=-0.04, b=0.04)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Projected):
                module.start()

    def forward(self, images: Tensor) -> Tensor:
        """images [B, S, S] -> class logits [B, 10]."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)  # [B, n, n, p, p]
        x = self.embedding(patches.flatten(3).flatten(1, 2)) + self.positions  # [B, N, E]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classifier(self.norm(x).mean(1))
        return logits


def run(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one attention with one seed.

    Args:
        cell: `task` is "lr=" and a learning rate; `data` a folder with the four IDX files of Fashion-MNIST (or MNIST),
            compressed or not; None for Debian's package dataset-fashion-mnist.
        progress: called after each epoch.

    Returns:
        Metrics ``accuracy`` (test split, in %, at the epoch that is best on the validation split), ``last_accuracy``
        and ``validation`` (in %), ``max_logit`` and ``query_norm`` on validation images at the end, and
        ``first_query_norm`` before the first step; all NaN if the run diverged, and ``diverged`` (0 or 1). Series
        ``train_loss``, ``validation`` and ``accuracy`` by epoch.

    Raises:
        ConfigError: a size is invalid, or the data is missing.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 256, "validation": 128, "epochs": 1, "layers": 2}
    size, batch, epochs = 28, options["batch"], options["epochs"]
    if size % options["patch"]:
        raise ConfigError(f"option patch is {options['patch']}, which does not divide the {size} pixels of a side")
    rate = float(cell.task.removeprefix("lr="))
    images, labels = read(cell.data, "train")
    test, test_labels = read(cell.data, "t10k")
    draw = torch.Generator().manual_seed(cell.seed)
    order = torch.randperm(len(images), generator=draw)
    count, held_out = options["train"], options["validation"]
    if count + held_out > len(images):
        raise ConfigError(f"train + validation is {count + held_out}, and there are {len(images)} training images")
    chosen, validation = order[:count], order[count : count + held_out]
    mean, deviation = images[chosen].mean(), images[chosen].std()
    images, test = (images - mean) / deviation, (test - mean) / deviation
    if cell.smoke:
        test, test_labels = test[:256], test_labels[:256]

    torch.manual_seed(cell.seed)
    shape = {name: options[name] for name in ("patch", "width", "layers", "heads")}
    model = VisionTransformer(cell.attention, size=size, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=options["weight_decay"])
    steps, warm = epochs * math.ceil(count / batch), options["warmup"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warm + 1)) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    probe = images[validation[:PROBE]]
    first = observe(model, probe)
    series: dict[str, list[float]] = {"train_loss": [], "validation": [], "accuracy": []}
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if state := load_state(cell):
        series = state["series"]
        draw.set_state(state["draw"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(len(series["train_loss"]), epochs):
        model.train()
        losses = []
        for picked in chosen[torch.randperm(count, generator=draw)].split(batch):
            loss = F.cross_entropy(model(images[picked]), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        mean_loss = torch.stack(losses).mean().item()
        if not math.isfinite(mean_loss):
            progress(1.0, f"diverged in epoch {epoch + 1}")
            missing = dict.fromkeys(("accuracy", "last_accuracy", "validation", "max_logit", "query_norm"), math.nan)
            return Result({**missing, "first_query_norm": first["query_norm"], "diverged": 1.0}, series)
        series["train_loss"].append(mean_loss)
        series["validation"].append(accuracy(model, images[validation], labels[validation]))
        series["accuracy"].append(accuracy(model, test, test_labels))
        kept = {name: part.state_dict() for name, part in parts.items()}
        save_state(cell, {"series": series, "draw": draw.get_state(), **kept})
        progress((epoch + 1) / epochs, f"epoch {epoch + 1} validation {series['validation'][-1]:.2f}")
    best = max(range(epochs), key=series["validation"].__getitem__)
    last = observe(model, probe)
    return Result(
        {
            "accuracy": series["accuracy"][best],
            "last_accuracy": series["accuracy"][-1],
            "validation": series["validation"][best],
            "max_logit": last["max_logit"],
            "query_norm": last["query_norm"],
            "first_query_norm": first["query_norm"],
            "diverged": 0.0,
        },
        series,
        {"best_epoch": best + 1, "parameters": sum(p.numel() for p in model.parameters()), "first": first},
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are classified correctly, in %."""
    model.eval()
    hits = sum(int((model(x).argmax(-1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True))
    return 100 * hits / len(images)


@torch.no_grad()
def observe(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the largest logit, the mean entropy in nats and the mean norm of queries, over all layers and heads."""
    model.eval()
    monitor = quest_core.Monitor(model)
    model(images)
    seen: list[dict[str, Any]] = list(monitor.collect().values())
    monitor.remove()

    def every(name: str) -> list[float]:
        return [value for layer in seen for value in layer.get(name, [math.nan])]

    norms, entropies = every("query_norm_mean"), every("entropy")
    return {
        "max_logit": max(every("max_logit")),
        "entropy": sum(entropies) / len(entropies),
        "query_norm": sum(norms) / len(norms),
    }


def read(folder: Path | None, split: str) -> tuple[Tensor, Tensor]:
    """Return the images [n, 28, 28], float32 in 0..1, and the labels [n] of a split, "train" or "t10k".

    Raises:
        ConfigError: a file is missing or is not of the IDX format; the message says where the data can be had.
    """
    found = []
    for name in (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"):
        home = folder or DEBIAN
        path = next((p for p in (home / f"{name}.gz", home / name) if p.is_file()), None)
        if path is None:
            raise ConfigError(
                f"no {name}.gz in '{home}'; install Debian's package dataset-fashion-mnist, or name a folder with the "
                "four files of Fashion-MNIST (github.com/zalandoresearch/fashion-mnist) as data"
            )
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        axes = raw[3] if raw[:3] == b"\0\0\x08" else 0
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
        if not axes or len(raw) != 4 + 4 * axes + math.prod(shape):
            raise ConfigError(f"'{path}' is not a complete IDX file of bytes; download it again")
        found.append(torch.frombuffer(bytearray(raw[4 + 4 * axes :]), dtype=torch.uint8).view(shape))
    images, labels = found
    return images.float() / 255, labels.long()
