"""Draws the figures of docs/. Every curve is computed with quest_core or a committed result.

python docs/figures.py                 every figure
python docs/figures.py logits [RUN]    the largest logit in training, of the committed run or of your own
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest_core

HERE = Path(__file__).resolve().parent / "figures"
LOGITS = HERE.parents[1] / "research" / "results" / "stability" / "logits"


def weight_of_a_growing_key(name: str, norms: Tensor) -> list[float]:
    """The share that one of 16 keys gets from a query at 60 degrees to it, when that key's norm is multiplied."""
    generator = torch.Generator().manual_seed(0)
    dim, count = 16, 16
    query = torch.zeros(1, 1, 1, dim)  # [B, H, N, D]
    query[..., 0] = 4.0
    keys = torch.randn(1, 1, count, dim, generator=generator)  # [B, H, M, D]
    keys[..., 0, :] = 0.0
    keys[..., 0, 0], keys[..., 0, 1] = 0.5 * dim**0.5, 0.75**0.5 * dim**0.5  # 60 degrees, the norm of the others
    values = torch.eye(count).reshape(1, 1, count, count)  # the output is the weights
    shares = []
    for norm in norms:
        grown = keys.clone()
        grown[..., 0, :] *= norm
        shares.append(quest_core.attention(query, grown, values, name)[0, 0, 0, 0].item())
    return shares


WIDTH, HEADS = 32, 4


def keys_of(norm: float) -> tuple[nn.Module, nn.Parameter]:
    """A layer whose keys start with an expected norm, the same otherwise, and the weight of its key projection."""
    torch.manual_seed(0)
    layer = quest_core.Attention(WIDTH, HEADS, f"quest(key_init={norm})", bias=False, dtype=torch.float64)
    return layer, layer.k_proj.weight


def turned(before: Tensor, after: Tensor, x: Tensor) -> float:
    """The mean angle, in degrees, between the keys x·Wᵀ of two weights [E, E] of a key projection; x [B, N, E]."""
    keys = [F.linear(x, weight.detach()).unflatten(-1, (HEADS, -1)) for weight in (before, after)]
    return torch.rad2deg(F.cosine_similarity(*keys, dim=-1).clamp(max=1).acos()).mean().item()


def angle_of_a_step(optimizer: type[torch.optim.Optimizer], lr: float, norm: float) -> float:
    """How far the first step of an optimizer turns keys that start with a norm."""
    layer, weight = keys_of(norm)
    x = torch.randn(8, 10, WIDTH, dtype=torch.float64)
    layer(x).square().sum().backward()
    before = weight.detach().clone()
    optimizer([weight], lr=lr).step()  # type: ignore[call-arg]
    return turned(before, weight, x)


def angles_of_training(norm: float, steps: int) -> list[float]:
    """How far each step of AdamW turns keys, on new random data in every step."""
    layer, weight = keys_of(norm)
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=1.0)
    angles = []
    for _ in range(steps):
        x, wanted = torch.randn(2, 8, 10, WIDTH, dtype=torch.float64)
        optimizer.zero_grad()
        F.mse_loss(layer(x), wanted).backward()
        before = weight.detach().clone()
        optimizer.step()
        angles.append(turned(before, weight, x))
    return angles


def draw_angles() -> None:
    """docs/figures/key-angle.png."""
    figure, (one, many) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    norms = [2.0**i for i in range(-2, 6)]
    for name, optimizer, lr, colour in (
        ("SGD", torch.optim.SGD, 1e-3, "#b03a2e"),
        ("Adam", torch.optim.Adam, 1e-3, "#1f618d"),
    ):
        one.loglog(norms, [angle_of_a_step(optimizer, lr, norm) for norm in norms], "o-", label=name, color=colour)
    one.set(xlabel="norm of the keys at the start", ylabel="angle of the first step, degrees")
    for norm, colour in ((1.0, "#5dade2"), (4.0, "#1f618d"), (16.0, "#154360")):
        angles = torch.tensor(angles_of_training(norm, 600)).unfold(0, 10, 10).mean(1)
        many.semilogy(range(10, 601, 10), angles, label=f"key_init={norm:.0f}", color=colour)
    many.set(xlabel="step of AdamW, rate 0.01, weight decay 1", ylabel="angle of a step, degrees")
    many.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    many.minorticks_off()
    for axes in (one, many):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(HERE / "key-angle.png", dpi=110, metadata={"Software": None})


def draw_growing_key() -> None:
    """docs/figures/growing-key.png, and growing-key-dark.png for pages with a dark background."""
    norms = torch.linspace(0.25, 8, 100)
    for suffix, style, colours in (
        ("", "default", ("#b03a2e", "#1f618d")),
        ("-dark", "dark_background", ("#ec7063", "#5dade2")),
    ):
        with plt.style.context(style):
            figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
            for name, colour in zip(("standard", "quest"), colours, strict=True):
                axes.plot(norms, weight_of_a_growing_key(name, norms), label=name, color=colour, linewidth=2)
            axes.set(xlabel="norm of one key, times that of the others", ylabel="attention it gets", ylim=(0, 1))
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
            path = HERE / f"growing-key{suffix}.png"
            figure.savefig(path, dpi=150, transparent=True, metadata={"Software": None})


def draw_logits_in_training(results: Path = LOGITS) -> None:
    """docs/figures/logits-in-training.png, a picture of the report of a run of stability/rates/vit."""
    from quest_bench.report import write_page

    with tempfile.TemporaryDirectory() as made:
        write_page(results, Path(made), "standard")
        shutil.copy(Path(made) / "report" / "01-vit-largest-logit-in-training.png", HERE / "logits-in-training.png")


def main() -> None:
    HERE.mkdir(exist_ok=True)
    if sys.argv[1:2] == ["logits"]:
        draw_logits_in_training(*map(Path, sys.argv[2:]))
        return
    plt.rcParams.update({"font.size": 11})
    draw_growing_key()
    draw_angles()
    draw_logits_in_training()


if __name__ == "__main__":
    main()
