"""Suite recall/mad: the six synthetic tasks of MAD (arXiv 2403.17844, github.com/athms/mad-lab), one skill each.

- in-context: pairs of a key and a value; the value of each of the eight keys is drawn for each sequence. When a key
  comes again, the model must name its value.
- fuzzy: the same with keys and values of one to three tokens.
- noisy: the same, but a fifth of the pairs is replaced by tokens that mean nothing.
- copying: the model must name, in order, the four tokens that lie among blanks.
- compression: a decoder without attention must name all eight tokens from the features of the last one, behind them.
- memorization: 127 keys have the same values in all sequences, so the weights must hold them.

As in MAD's base setting, the model has two blocks, tokens are 16 (noisy 32, memorization 255), and the keys of recall
are 8. The rest is smaller: 64 tokens a sequence for 128 (copying 256), 4 tokens to copy for 16, 8 to compress for 31,
width 32 for 128, 800 steps of 32 sequences for 20,000 of 128 (memorization 400). Further differences:

- As in recall/mqar, a token also sees the one before it, without which `standard` learned no recall in 800 steps.
- Positions are learned, in place of rotary. The MLP has GELU, in place of SwiGLU.
- The loss is that of the answers. MAD's training on recall also predicts tokens that nothing determines.
- A fuzzy sequence has eight keys of any length. MAD draws from all keys, and its test has only keys of three tokens.
- MAD's variations of length, vocabulary, noise and training data are left out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quest_suites.contract import Cell, Progress, Result

from .images import IGNORED
from .language import CONTEXT
from .recall import RecallModel, learn

KEYS, VALUES, NOISE = range(8), range(8, 16), range(16, 32)
COPIED = 4
BLANK, LAST = 14, 15
COMPRESSED = 8
FACTS = 127
Motif: TypeAlias = tuple[int, ...]
Row: TypeAlias = tuple[list[int], list[int]]
"""Tokens, and the answers at the places that ask, else IGNORED."""


def run(cell: Cell, progress: Progress) -> Result:
    """Train one attention on one task with one seed at every learning rate; see `learn`."""
    options = dict(cell.options)
    if cell.smoke:
        options |= {"train": 64, "test": 16, "epochs": 1, "rates": 2}
    options["vocabulary"], row = TASKS[cell.task]
    dice = Random(cell.seed)
    splits = []
    for count in ("train", "test", "test"):
        tokens, wanted = zip(*(row(dice) for _ in range(options[count])), strict=True)
        splits.append((torch.tensor(tokens), torch.tensor(wanted)))
    model = AutoEncoder if cell.task == "compression" else RecallModel
    return learn(cell, options, splits, lambda: model(cell.attention, options), progress)


def recall(dice: Random, longest: int = 1, noise: float = 0.0) -> Row:
    """Draw pairs of a key and a value of up to `longest` tokens, of which noise replaces a share."""

    def motif(of: range) -> Motif:
        return tuple(dice.sample(of, dice.randint(1, longest)))

    value_of: dict[Motif, Motif] = {}
    while len(value_of) < len(KEYS):
        value_of[motif(KEYS)] = motif(VALUES)
    keys, seen = list(value_of), set[Motif]()
    tokens: list[int] = []
    wanted: list[int] = []
    while len(tokens) < CONTEXT:
        if dice.random() < noise:
            tokens += dice.choices(NOISE, k=2)
            wanted += 2 * [IGNORED]
            continue
        key = dice.choice(keys)
        value = value_of[key]
        tokens += key + value
        asked = value if key in seen else len(value) * (IGNORED,)
        wanted += (len(key) - 1) * (IGNORED,) + asked + (IGNORED,)  # from the key's last token on
        seen.add(key)
    return tokens[:CONTEXT], wanted[:CONTEXT]


def copying(dice: Random) -> Row:
    """Draw tokens among blanks; behind `LAST`, the first blank asks for the first token and so on."""
    copied, room = dice.choices(range(BLANK), k=COPIED), CONTEXT - COPIED
    tokens = [BLANK] * CONTEXT
    for place, token in zip(sorted(dice.sample(range(room - 1), COPIED)), copied, strict=True):
        tokens[place] = token
    tokens[room - 1] = LAST
    return tokens, [IGNORED] * room + copied


def compression(dice: Random) -> Row:
    """Draw tokens that are all asked for, and `LAST`."""
    tokens = dice.choices(range(LAST), k=COMPRESSED)
    return [*tokens, LAST], [*tokens, IGNORED]


def memorization(dice: Random) -> Row:
    """Draw keys, each before a token that asks for its value. Any fixed map will do, because tokens have no order."""
    keys = dice.choices(range(FACTS), k=16)
    return [x for key in keys for x in (key, 2 * FACTS)], [x for key in keys for x in (IGNORED, FACTS + key)]


TASKS: dict[str, tuple[int, Callable[[Random], Row]]] = {
    "in-context": (16, recall),
    "fuzzy": (16, partial(recall, longest=3)),
    "noisy": (32, partial(recall, noise=0.2)),
    "copying": (16, copying),
    "compression": (16, compression),
    "memorization": (2 * FACTS + 1, memorization),
}
"""Task -> size of the vocabulary, and what draws a sequence."""


class FromTheLast(nn.Module):
    """Give every place the features of the last token, and an embedding of the place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.places = nn.Embedding(COMPRESSED + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, E] -> [B, N, E]."""
        return x[:, -1:] + self.places.weight


class AutoEncoder(RecallModel):
    """A model whose logits all come from its last token, by a decoder without attention."""

    def __init__(self, attention: str, options: Mapping[str, Any]) -> None:
        super().__init__(attention, options)
        width = options["width"]
        layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        self.out = nn.Sequential(FromTheLast(width), *layers, self.out)
