"""A character model of Python's own documentation, in plain PyTorch, with any attention.

  python train.py --attention standard
  python train.py --attention quest
  python train.py --attention "quest+gqa(kv_heads=2)"
  python train.py --attention "quest(init=12)"  # queries start at norm 12; the default, null, is the paper's

Needs only quest-core; the text comes with Python.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
from torch import nn

import quest_core


class CharacterModel(nn.Module):
    """Stock PyTorch modules; nothing in here knows of QUEST."""

    def __init__(self, vocabulary: int, length: int, width: int = 128, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.5 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions  # [B, N, width]
        return self.output(self.encoder(x, self.mask, is_causal=True))  # [B, N, vocabulary]


def batches(text: torch.Tensor, size: int, length: int, seed: int):
    """Random pieces of the text and the same pieces one character later."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(text) - length - 1, (size, 1), generator=draw)
        piece = text[start + torch.arange(length + 1)]  # [B, N + 1]
        yield piece[:, :-1], piece[:, 1:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--attention", default="quest", help="any text that `quest check` understands")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()

    characters = sorted({c for text in topics.values() for c in text})
    code = {c: i for i, c in enumerate(characters)}
    text = torch.tensor([code[c] for name in sorted(topics) for c in topics[name]])
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    torch.manual_seed(chosen.seed)
    model = CharacterModel(len(characters), length=128)
    model, report = quest_core.inject(model, chosen.attention, fresh=True)  # before the optimizer
    print(report)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    began, source = time.monotonic(), batches(train, 16, 128, chosen.seed)
    for step in range(1, chosen.steps + 1):
        inputs, targets = next(source)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == chosen.steps:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.monotonic() - began:5.1f} s", flush=True)

    model.eval()
    source = batches(held_out, 32, 128, 1)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            for inputs, targets in (next(source) for _ in range(20))
        ]
    print(f"{chosen.attention}: {torch.stack(losses).mean().item():.3f} nats a character on held-out text")


if __name__ == "__main__":
    main()
