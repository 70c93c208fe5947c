"""Draws the figures of docs/mathematics.md: python docs/figures.py. Every curve is computed with quest_core."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

import quest_core

HERE = Path(__file__).resolve().parent / "figures"


def weight_of_a_growing_key(name: str, norms: torch.Tensor) -> list[float]:
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


def main() -> None:
    HERE.mkdir(exist_ok=True)
    plt.rcParams.update({"font.size": 11})
    norms = torch.linspace(0.25, 8, 100)
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, colour in (("standard", "#b03a2e"), ("quest", "#1f618d")):
        axes.plot(norms, weight_of_a_growing_key(name, norms), label=name, color=colour, linewidth=2)
    axes.set(xlabel="norm of one key, times that of the others", ylabel="attention it gets", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / "growing-key.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
