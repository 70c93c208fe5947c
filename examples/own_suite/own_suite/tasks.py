"""A small Transformer that says which class a sequence has."""

from pathlib import Path

import torch
from torch import Tensor, nn

import quest_core
from quest_suites.contract import Cell, Progress, Result


class Classifier(nn.Module):
    """Values [B, T] -> logits of the classes [B, C]."""

    def __init__(self, length: int, classes: int, attention: str) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(1, 32), nn.Parameter(0.02 * torch.randn(length, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder, _ = quest_core.inject(nn.TransformerEncoder(layer, 2), attention, fresh=True)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x[..., None]) + self.places).mean(1))  # type: ignore[no-any-return]


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention with one seed; returns the accuracy on test.csv in percent."""
    assert cell.data is not None  # the suite requires it
    (x, y), (test_x, test_y) = (read(cell.data / name) for name in ("train.csv", "test.csv"))
    torch.manual_seed(cell.seed)
    model = Classifier(x.shape[1], int(max(y.max(), test_y.max())) + 1, cell.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = 1 if cell.smoke else cell.options["epochs"]
    for epoch in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        progress((epoch + 1) / epochs, f"epoch {epoch + 1}")
    with torch.no_grad():
        right = (model.eval()(test_x).argmax(-1) == test_y).float().mean()
    return Result({"accuracy": 100 * right.item()})


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Return the values [n, T] and classes [n] of a file."""
    rows = torch.tensor([[float(value) for value in line.split(",")] for line in path.read_text().splitlines()])
    return rows[:, 1:], rows[:, 0].long()
