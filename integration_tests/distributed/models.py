"""A small Transformer and its training, alike on one process and on several; in float64, where sums in another order
do not show."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quest_core

E, H, N, BATCH, LAYERS = 16, 4, 8, 4, 3

TRAINED = [
    "standard",
    "quest",
    "qknorm-hs",
    "quest+gqa(kv_heads=2)",
    "quest+dgqa(kv_heads=2, window=1)",
    "elliptical-quest",
    "quest+sigmoid",
    "cosine",
]
"""One of each kind: no state, a parameter, fewer key heads, state, values of the layer before, no softmax, a family."""


class Block(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        self.attention = quest_core.Attention(E, H, attention)
        self.mlp = nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Blocks, each computed again in the backward pass if `recompute`."""

    def __init__(self, block: Callable[[], nn.Module], *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.recompute = recompute
        quest_core.chain(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def build(attention: str, *, seed: int = 0, recompute: bool = False) -> Model:
    """Key heads of unlike size, so that key-driven grouping has something to find."""
    torch.manual_seed(seed)
    model = Model(lambda: Block(attention), recompute=recompute).double()
    with torch.no_grad():
        for block in model.blocks:
            weight = block.attention.k_proj.weight
            weight[: len(weight) // 2] *= 0.3
    return model


def data(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, [BATCH, N, E] each."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, BATCH, N, E, generator=generator, dtype=torch.float64)
    return x, y


def train(
    model: nn.Module,
    share: Callable[[Tensor], Tensor] = lambda x: x,
    *,
    steps: range = range(3),
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Steps of SGD with momentum on each rank's share of the batch; the losses."""
    optimizer = optimizer or sgd(model)
    losses = []
    for step in steps:
        x, y = map(share, data(step))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def half(rank: int) -> Callable[[Tensor], Tensor]:
    """This rank's half of a batch."""
    return lambda x: x.chunk(2)[rank]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, whole and on the CPU."""
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in model.state_dict().items()
    }


def check_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
