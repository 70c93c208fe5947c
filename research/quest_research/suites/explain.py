"""explain/fashion-mnist: how well maps of a classifier's attention cover its object (QUEST, table 6).

Each image of Fashion-MNIST lies at a random place of a larger canvas of uniform noise, aligned with the patches. Its
pixels above 0 are the object's mask, exact by construction. A small Vision Transformer is trained to classify the
canvas; the epoch with the best accuracy on held-out images is kept. Two maps over the tokens are computed for each
test image:

- AG-CAM (Leem and Seo, 2024): positive gradients of the true class's logit with respect to the attention weights,
  times the sigmoid of the attention logits, summed over heads and layers.
- Attention rollout (Abnar and Zuidema, 2020): the product over layers of (A + I) / 2, A the mean over the heads.

Both methods read the row of the class token. This model averages its tokens before the classifier, so the rows of all
queries are averaged. A map is interpolated to pixels (bilinear), scaled to 0..1 for each image, and cut at 0.5, as in
QUEST. All test images count, also those that are classified wrongly.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import quest_core
from quest_core.errors import ConfigError
from quest_suites.contract import Cell, Progress, Result

from .images import VisionTransformer, accuracy, classify, read

SHOWN = 4
"""Test images in the pictures of a report."""
PART = 250
"""Images whose attention weights are held at a time."""


def run(cell: Cell, progress: Progress) -> Result:
    """Train a classifier with one attention and one seed, and compare its maps with the masks.

    Returns:
        Metrics in %: for "AG-CAM" and "rollout" each ``IoU``, ``Dice``, ``pixel accuracy`` and ``pointing`` (the share
        of images in which the largest value of the map lies on the object), such as ``AG-CAM IoU``; ``accuracy`` on the
        test images. Series ``train_loss`` and ``validation``. Details: maps of the first test images.
    """
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 128, "validation": 64, "test": 64, "epochs": 1, "layers": 2}
    size, count, held_out = options["size"], options["train"], options["validation"]
    if size < 28 or size % options["patch"]:
        raise ConfigError(f"option size is {size}; it is at least 28 and a multiple of patch={options['patch']}")
    if quest_core.AttentionConfig.parse(cell.attention).family:
        raise ConfigError(f"attention '{cell.attention}' has no weights to explain; choose a score with a normalizer")
    draw = torch.Generator().manual_seed(cell.seed)
    images, labels = read(cell.data, "train")
    if count + held_out > len(images):
        raise ConfigError(f"train + validation is {count + held_out}, and there are {len(images)} training images")
    picked = torch.randperm(len(images), generator=draw)[: count + held_out]
    canvases, _ = place(images[picked], size, options["patch"], options["noise"], draw)
    labels = labels[picked]
    test, test_labels = (part[: options["test"]] for part in read(cell.data, "t10k"))
    same = torch.Generator().manual_seed(0)  # every seed has the same test
    test, masks = place(test, size, options["patch"], options["noise"], same)
    mean, deviation = canvases[:count].mean(), canvases[:count].std()
    canvases, shown, test = (canvases - mean) / deviation, test[:SHOWN], (test - mean) / deviation

    torch.manual_seed(cell.seed)
    model = VisionTransformer(cell.attention, options, size=(size, size))
    found = classify(
        cell,
        "training",
        model,
        (canvases[:count], labels[:count]),
        {"validation": (canvases[count:], labels[count:])},
        options,
        rate=options["rate"],
        progress=progress,
    )
    if found.diverged:
        return Result({"AG-CAM IoU": math.nan, "accuracy": math.nan})
    model.load_state_dict(found.weights)
    metrics = {"accuracy": accuracy(model, test, test_labels)}
    examples: dict[str, Any] = {"images": (255 * shown).byte().tolist(), "masks": masks[:SHOWN].byte().tolist()}
    sums: dict[str, float] = {}
    for start in range(0, len(test), PART):
        some = slice(start, start + PART)
        for name, tokens in maps(model, test[some], test_labels[some]).items():
            if not start:
                examples[name] = [[round(v, 4) for v in one] for one in tokens[:SHOWN].tolist()]
            for measure, value in compare(to_pixels(tokens, size), masks[some]).items():
                key = f"{name} {measure}"
                sums[key] = sums.get(key, 0.0) + value.double().sum().item()
    metrics |= {name: 100 * value / len(test) for name, value in sums.items()}
    return Result(metrics, found.series, {"examples": examples, "object": 100 * masks.double().mean().item()})


def place(images: Tensor, size: int, step: int, noise: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put each image [n, s, s] at a random place of a canvas [n, size, size] of noise that is uniform in 0..noise.

    Places are multiples of `step` pixels. Returned are the canvases, and masks that are True on the object, which are
    the pixels above 0.
    """
    n, side = images.shape[:2]
    canvases = noise * torch.rand(n, size, size, generator=draw)
    masks = torch.zeros(n, size, size, dtype=torch.bool)
    corners = step * torch.randint((size - side) // step + 1, (2, n, 1), generator=draw)
    rows, columns = corners + torch.arange(side)  # [n, s] each
    where = (torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :])
    masks[where] = images > 0
    canvases[where] = torch.where(images > 0, images, canvases[where])
    return canvases, masks


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While the context lasts, list the weights and logits [B, H, N, M] of every attention, in the order of calls."""
    found: list[tuple[Tensor, Tensor]] = []

    def forward(mechanism: quest_core.Mechanism, *args: Any, **kwargs: Any) -> Tensor:
        out, weights, logits = mechanism.forward_with_logits(*args, **kwargs)
        found.append((weights, logits))
        return out

    with mock.patch.object(quest_core.Mechanism, "forward", forward):
        yield found


def maps(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return "AG-CAM" and "rollout" over the tokens, [B, N] each, of images [B, S, S] and the logits of labels [B]."""
    with recorded() as seen:
        score = model(images).gather(1, labels[:, None]).sum()
    weights = [layer[0] for layer in seen]
    gradients = torch.autograd.grad(score, weights)
    with torch.no_grad():
        layers = zip(gradients, seen, strict=True)
        cam = torch.stack([(g.relu() * logits.sigmoid()).sum(1).mean(1) for g, (_, logits) in layers]).sum(0)
        return {"AG-CAM": cam, "rollout": rollout([layer.detach().mean(1) for layer in weights])}


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """Return the flow of attention from all output tokens to each input token [B, N].

    `weights` are those of each layer [B, N, N], averaged over the heads.
    """
    identity = torch.eye(weights[0].shape[-1])
    flow = identity
    for layer in weights:
        mixed = (layer + identity) / 2
        flow = mixed / mixed.sum(-1, keepdim=True) @ flow
    return flow.mean(-2)


def to_pixels(tokens: Tensor, size: int) -> Tensor:
    """Interpolate maps over a square grid of tokens [B, N] to pixels and scale each to 0..1, [B, S, S]."""
    side = math.isqrt(tokens.shape[1])
    grid = tokens.view(-1, 1, side, side)
    pixels = F.interpolate(grid, size=(size, size), mode="bilinear", align_corners=False)[:, 0]
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    return (pixels - low) / (high - low).clamp(min=1e-12)


def compare(pixels: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Compare maps [B, S, S] in 0..1 with masks [B, S, S]; values in 0..1, [B] each."""
    found = pixels >= 0.5
    both, either = (found & masks).sum((1, 2)), (found | masks).sum((1, 2))
    return {
        "IoU": both / either.clamp(min=1),
        "Dice": 2 * both / (both + either).clamp(min=1),
        "pixel accuracy": (found == masks).float().mean((1, 2)),
        "pointing": masks.flatten(1).gather(1, pixels.flatten(1).argmax(1)[:, None])[:, 0].float(),
    }


def pictures(rows: pd.DataFrame, results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Figure]]:
    """Title, caption and figure: the maps of the lowest seed over the first test images."""
    seed = min(cell["seed"] for cell in results)
    first = {cell["attention"]: cell["details"]["examples"] for cell in results if cell["seed"] == seed}
    attentions = [name for name in dict.fromkeys(rows["attention"]) if name in first]
    names = [(attention, kind) for attention in attentions for kind in ("AG-CAM", "rollout")]
    some = first[attentions[0]]
    figure = Figure(figsize=(1.35 * (1 + len(names)), 1.4 * len(some["images"]) + 0.5), layout="constrained")
    grid = figure.subplots(len(some["images"]), 1 + len(names), squeeze=False)
    for place_, line in enumerate(grid):
        mask = some["masks"][place_]
        for axes, (attention, kind) in zip(line, [("image", ""), *names], strict=True):
            axes.imshow(some["images"][place_], cmap="gray", vmin=0, vmax=255)
            if kind:
                pixels = to_pixels(torch.tensor(first[attention][kind][place_])[None], len(mask))[0]
                axes.imshow(pixels.numpy(), cmap="magma", alpha=0.75, vmin=0, vmax=1)
            axes.contour(mask, levels=[0.5], colors="#56b4e9", linewidths=0.8)
            axes.set_axis_off()
            if place_ == 0:
                axes.set_title(f"{attention}\n{kind}", fontsize=8)
    caption = (
        f"The first test images, seed {seed}; bright is important, the line is the edge of the mask. Each map is "
        "scaled to its own range."
    )
    return [("Maps", caption, figure)]
