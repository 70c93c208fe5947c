"""Suites images/*: a small Vision Transformer that classifies images, and what other suites train with it.

The model is a pre-norm ViT (Dosovitskiy et al., 2021) whose tokens are averaged before the classifier. All Linear
weights and the positions start from a normal distribution with standard deviation 0.02, truncated at two standard
deviations, and all biases at 0. AdamW, a cosine schedule that starts at the full rate and ends at 0, no warm-up
unless asked for, no dropout. Images are 0..1 and the model subtracts the mean of the training images and divides by
their deviation, for each channel.

images/digits trains on scikit-learn's handwritten digits of 8 x 8 pixels, images/fashion-mnist on clothes, and
images/mnist-1d on signals of 40 samples, which are images of one row. None but images/recipes has augmentation or
clipping of gradients. It has two recipes:

- vit: gradients are clipped to norm 1, as in the ViT paper.
- deit (Touvron et al., 2021): flips, shifts, mixup 0.8 or cutmix 1.0, random erasing 0.25, label smoothing 0.1 and
  stochastic depth 0.1. RandAugment, repeated augmentation and distillation are left out.

A part of the training images is held out. The reported test accuracy is that of the epoch with the best accuracy on
these validation images; the test images choose nothing. With the option `rates`, images/recipes also chooses the
learning rate so, for each attention and seed. A run whose loss is not finite ends, and counts as diverged.
"""

import contextlib
import gzip
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core
from quest_core.errors import ConfigError
from quest_core.projections import init_norms
from quest_suites import cifar
from quest_suites.contract import Cell, Progress, Result, Trained, at_best_rate, observe, sweep

from .training import Fit, Float16Products, fit

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
PROBE = 512
"""Validation images on which logits and norms are measured."""
SMOKE = {"train": 256, "validation": 128, "epochs": 1, "layers": 2, "test": 256}
IGNORED = -100
"""A label that asks nothing, as for `torch.nn.functional.cross_entropy`."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Split: TypeAlias = tuple[Tensor, Tensor]
"""Inputs [n, ...] and labels, [n] for images, [n, N] for text."""


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then an MLP of four times the width.

    `drop` is the probability with which training skips a branch for a sample (stochastic depth).
    """

    def __init__(self, width: int, heads: int, attention: str, causal: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = quest_core.Attention(width, heads, attention)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.causal, self.drop = causal, drop

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, E] -> [B, N, E]."""
        x = x + self._kept(self.attention(self.norm1(x), is_causal=self.causal))
        return x + self._kept(self.mlp(self.norm2(x)))

    def _kept(self, branch: Tensor) -> Tensor:
        if not (self.training and self.drop):
            return branch
        keep = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop  # [B, 1, 1]
        return branch * keep / (1 - self.drop)


def start(model: nn.Module) -> None:
    """Initialize every Linear and Embedding; attentions with options such as quest(init=12) set their norms."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    init_norms(model)


class VisionTransformer(nn.Module):
    """Classify images of `size` pixels, height and width, which the option patch divides.

    The other options are width, layers and heads.
    """

    mean: Tensor  # [C, 1, 1]
    deviation: Tensor  # [C, 1, 1]

    def __init__(
        self,
        attention: str,
        options: Mapping[str, Any],
        *,
        size: Sequence[int],
        channels: int = 1,
        classes: int = 10,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        patch, width, heads = options["patch"], options["width"], options["heads"]
        if any(side % patch for side in size):
            sides = " × ".join(map(str, size))
            raise ConfigError(f"option patch is {patch}, which does not divide the sides of {sides} pixels")
        self.patch = patch
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))
        self.embedding = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(torch.empty(math.prod(side // patch for side in size), width))  # [N, E]
        self.blocks = nn.Sequential(*(Block(width, heads, attention, drop=drop) for _ in range(options["layers"])))
        quest_core.chain(self)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.positions, std=0.02, a=-0.04, b=0.04)
        start(self)

    def forward(self, images: Tensor) -> Tensor:
        """images [B, C, H, W], or [B, H, W] of one channel -> class logits [B, classes]."""
        images = images[:, None] if images.dim() == 3 else images
        images = (images - self.mean) / self.deviation
        patches = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)  # [B, C, n, n, p, p]
        x = self.embedding(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)) + self.positions  # [B, N, E]
        logits: Tensor = self.classifier(self.norm(self.blocks(x)).mean(1))
        return logits


# --- training -------------------------------------------------------------------------------------------------------


def classify(
    cell: Cell,
    phase: str,
    model: nn.Module,
    train: Split,
    splits: Mapping[str, Split],
    options: Mapping[str, Any],
    *,
    rate: float,
    progress: Progress,
    precision: str = "float32",
    change: Callable[[Tensor, Tensor], Split] | None = None,
    watch: Callable[[nn.Module], Mapping[str, float | list[float]]] | None = None,
    **more: Any,
) -> Fit:
    """Train a classifier and choose its epoch by the accuracy on a split; see `quest_research.suites.training.fit`.

    Args:
        cell, phase, progress, more: as in `fit`.
        model: inputs [B, ...] -> logits [B, classes] or [B, N, classes].
        splits: their accuracies are measured after each epoch; "validation" is one of them and chooses the epoch.
        options: epochs, batch, warmup (steps) and weight_decay.
        precision: a key of `PRECISIONS`, for autocast while training; float16 also scales the loss.
        change: augments inputs and labels of a mini-batch; its labels may be probabilities [B, classes].
        watch: gives further values after each epoch; see `measure` of `fit`.
    """
    device = next(model.parameters()).device.type

    def loss(picked: Tensor) -> Tensor:
        x, y = train[0][picked], train[1][picked]
        x, y = change(x, y) if change else (x, y)
        with torch.autocast(device, PRECISIONS[precision], enabled=precision != "float32"):
            logits = model(x).flatten(0, -2)
        return F.cross_entropy(logits.float(), y if y.is_floating_point() else y.flatten())

    with Float16Products() if precision == "float16" else contextlib.nullcontext():
        return fit(
            cell,
            phase,
            model,
            loss,
            len(train[0]),
            {**options, "rate": rate},
            measure=lambda: (
                {name: accuracy(model, *split) for name, split in splits.items()} | dict(watch(model) if watch else {})
            ),
            progress=progress,
            select="validation",
            scale_loss=precision == "float16",
            **more,
        )


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of labels that are predicted correctly, in %; those that are `IGNORED` do not count."""
    model.eval()
    pieces = zip(inputs.split(500), labels.split(500), strict=True)
    return 100 * sum(int((model(x).argmax(-1) == y).sum()) for x, y in pieces) / int((labels != IGNORED).sum())


def at_rates(
    cell: Cell,
    options: Mapping[str, Any],
    lowest: float,
    splits: Sequence[Split],
    make: Callable[[], nn.Module],
    how: Callable[[nn.Module], Mapping[str, Any]],
    guess: float,
    progress: Progress,
) -> dict[str, Trained]:
    """Train a classifier from the same weights at each of the rates of `sweep`, and test its best epoch.

    Args:
        options: those of `classify`, and rates, their number.
        splits: training, validation and test.
        make: returns a model.
        how: returns further arguments of `classify` for a model.
        guess: the accuracy of guessing, which a rate that diverges has.
    """
    train, validation, test = splits

    def once(rate: float, name: str, progress: Progress) -> Trained:
        torch.manual_seed(cell.seed)
        model = make()
        more = how(model)
        held = {"validation": validation}
        found = classify(cell, name, model, train, held, options, rate=rate, progress=progress, **more)
        if found.diverged:
            return Trained(guess, guess, found.series, diverged=True)
        model.load_state_dict(found.weights)
        return Trained(accuracy(model, *test), max(found.series["validation"]), found.series)

    return sweep(lowest, options["rates"], once, progress)


# --- the suites -----------------------------------------------------------------------------------------------------


def run(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one attention with one seed, without a recipe.

    Returns:
        Metrics ``accuracy`` (test split, in %, at the epoch that is best on the validation split), ``last_accuracy``
        and ``validation`` (in %), ``max_logit`` and ``query_norm`` on validation images at the end, and
        ``first_query_norm`` before the first step; all NaN if the run diverged, and ``diverged`` (0 or 1). Series
        ``train_loss``, ``validation``, ``accuracy`` and ``max_logit`` by epoch.
    """
    options = {**cell.options, **(SMOKE if cell.smoke else {})}
    draw = torch.Generator().manual_seed(cell.seed)
    data = load(cell.data, options, draw, digits() if cell.suite == "images/digits" else None)
    torch.manual_seed(cell.seed)
    model = build(cell.attention, data, options)
    probe = data.validation[0][:PROBE]
    first = observe(model, probe)
    found = classify(
        cell,
        "training",
        model,
        data.train,
        {"validation": data.validation, "accuracy": data.test},
        options,
        rate=float(cell.task.removeprefix("lr=")),
        draw=draw,
        progress=progress,
        watch=lambda model: {"max_logit": observe(model, probe)["max_logit"]},
    )
    if found.diverged:
        missing = dict.fromkeys(("accuracy", "last_accuracy", "validation", "max_logit", "query_norm"), math.nan)
        return Result({**missing, "first_query_norm": first["query_norm"], "diverged": 1.0}, found.series)
    best, series, last = found.selected, found.series, observe(model, probe)
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


def recipe(cell: Cell, progress: Progress) -> Result:
    """Train one attention with the recipe that the task names, "vit" or "deit", from the same weights at each rate.

    Returns:
        What `at_best_rate` returns, with the test accuracy in % at the epoch that is best on the validation split, and
        series ``train_loss`` and ``validation``.
    """
    options = {**cell.options, **(SMOKE if cell.smoke else {})}
    data = load(cell.data, options, torch.Generator().manual_seed(cell.seed))
    deit = cell.task == "deit"
    make = partial(build, cell.attention, data, options, drop=0.1 if deit else 0.0)

    def how(model: nn.Module) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(cell.seed)
        change = partial(augment, classes=data.classes, draw=draw) if deit else None
        clip = math.inf if deit else 1.0
        return {"draw": draw, "precision": options["precision"], "clip": clip, "change": change}

    splits = (data.train, data.validation, data.test)
    return at_best_rate(at_rates(cell, options, options["rate"], splits, make, how, math.nan, progress))


def build(attention: str, data: "Images", options: Mapping[str, Any], drop: float = 0.0) -> VisionTransformer:
    """Return the model of the options patch, width, layers and heads, with the statistics of the training images."""
    images = data.train[0]
    channels, *size = images.shape[1:]
    model = VisionTransformer(attention, options, size=size, channels=channels, classes=data.classes, drop=drop)
    model.mean, model.deviation = (x[:, None, None].cpu() for x in (images.mean((0, 2, 3)), images.std((0, 2, 3))))
    return model.to(data.device)


def augment(x: Tensor, y: Tensor, classes: int, draw: torch.Generator) -> Split:
    """Return images [B, C, S, S] and labels [B] after DeiT's augmentation that needs no image library.

    The labels become probabilities [B, classes], by label smoothing and mixing.
    """
    size, margin = x.shape[-1], max(1, x.shape[-1] // 8)

    def chance(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=draw).to(x.device)

    def place(share: float) -> tuple[slice, slice]:
        """A random square that covers a share of the image."""
        side = round(size * math.sqrt(share))
        top, left = (int(torch.randint(size - side + 1, (), generator=draw)) for _ in range(2))
        return slice(top, top + side), slice(left, left + side)

    flipped = chance(len(x)) < 0.5
    x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
    down, right = (torch.randint(-margin, margin + 1, (len(x),), generator=draw).to(x.device) for _ in range(2))
    grid = torch.arange(size, device=x.device)
    rows, columns = (grid + down[:, None]) % size, (grid + right[:, None]) % size  # [B, S] each
    x = x[torch.arange(len(x), device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None]]  # [B, S, S, C]
    x = x.permute(0, 3, 1, 2).contiguous()
    target = torch.full((len(x), classes), 0.1 / classes, device=x.device)
    target = target.scatter_add(1, y[:, None], torch.full((len(x), 1), 0.9, device=x.device))
    seed = int(torch.randint(2**31, (), generator=draw))
    cut = bool(torch.rand((), generator=draw) < 0.5)
    share = float(np.random.default_rng(seed).beta(*((1.0, 1.0) if cut else (0.8, 0.8))))
    if cut:
        box = place(1 - share)
        share = 1 - (box[0].stop - box[0].start) ** 2 / size**2
        other = x.flip(0)
        x[:, :, box[0], box[1]] = other[:, :, box[0], box[1]]
    else:
        x = share * x + (1 - share) * x.flip(0)
    target = share * target + (1 - share) * target.flip(0)
    for row in (chance(len(x)) < 0.25).nonzero().flatten().tolist():
        box = place(0.02 + 0.31 * float(torch.rand((), generator=draw)))
        x[row, :, box[0], box[1]] = torch.rand((), generator=draw)
    return x, target


# --- the data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images [n, C, S, S], float32 in 0..1, and labels [n] of each split, on the device that trains."""

    train: Split  # drawn for each seed
    validation: Split  # further training images
    test: Split  # the first ones in an order that is the same for all seeds
    classes: int

    @property
    def device(self) -> torch.device:
        return self.train[0].device


def load(
    folder: Path | None, options: Mapping[str, Any], draw: torch.Generator, sources: list[Split] | None = None
) -> Images:
    """Read the images of a folder.

    Args:
        folder: holds the four IDX files of Fashion-MNIST or MNIST, compressed or not, or the binary version of
            CIFAR-10, or MNIST-1D. None takes Debian's package dataset-fashion-mnist.
        options: train and validation, numbers of images; test, 0 or left out for all.
        draw: selects training and validation images.
        sources: the training and the test split in place of a folder, as `Images` has them or as bytes.
    """
    (training, labels), (test, test_labels) = sources or _sources(folder)
    count, held_out = options["train"], options["validation"]
    if count + held_out > len(labels):
        raise ConfigError(f"train + validation is {count + held_out}, and there are {len(labels)} training images")
    order = torch.randperm(len(labels), generator=draw)
    some = torch.randperm(len(test_labels), generator=torch.Generator().manual_seed(0))
    some = some[: options.get("test") or len(some)]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def split(images: Tensor, of: Tensor, chosen: Tensor) -> Split:
        images = images[chosen]  # [n, C, S, S]
        images = images if images.is_floating_point() else images.float() / 255
        return images.to(device), of[chosen].to(device)

    return Images(
        split(training, labels, order[:count]),
        split(training, labels, order[count : count + held_out]),
        split(test, test_labels, some),
        int(max(labels.max(), test_labels.max())) + 1,
    )


def _sources(folder: Path | None) -> list[Split]:
    """Return the training and the test split of a folder."""
    if folder and any(folder.glob("*.bin")):
        return [cifar.read(folder / name for name in names) for names in (cifar.TRAIN, cifar.TEST)]
    if folder and (path := folder / "mnist1d.npz").is_file():
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in ("x", "y", "x_test", "y_test")}
        return [(found[f"x{part}"].float()[:, None, None], found[f"y{part}"]) for part in ("", "_test")]
    return [(images[:, None], labels) for images, labels in (read(folder, split) for split in ("train", "t10k"))]


def read(folder: Path | None, split: str) -> Split:
    """Return the images [n, 28, 28], float32 in 0..1, and the labels [n] of a split, "train" or "t10k"."""
    home = folder or DEBIAN
    found = []
    for name in (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"):
        path = next((p for p in (home / f"{name}.gz", home / name) if p.is_file()), None)
        if path is None:
            raise ConfigError(
                f"no {name}.gz in '{home}'; install Debian's package dataset-fashion-mnist, or name a folder as "
                "data: the four files of Fashion-MNIST (github.com/zalandoresearch/fashion-mnist), or the binary "
                "version of CIFAR-10"
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


def digits() -> list[Split]:
    """Return the handwritten digits of scikit-learn [1797, 1, 8, 8]: the first 1,200 for training, 597 for the test.

    The file is read without scikit-learn, whose import takes longer than half of a training.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :64]).view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(table[:, 64]).long()
    return [(images[part], labels[part]) for part in (slice(1200), slice(1200, None))]
