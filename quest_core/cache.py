"""Cache: what one attention layer remembers between the steps of incremental decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


class Cache:
    """The state of one layer: named tensors, each with the batch as its first axis.

    A softmax mechanism keeps ``k`` (as the score prepared it: unit vectors for quest) and ``v``, [B, G, M, D]; a
    recurrent one (linear, cosine, aft-simple) keeps running sums, whose size does not grow.

    Attributes:
        tokens: how many tokens have been decoded.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._state: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._state[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def append(self, name: str, new: Tensor) -> Tensor:
        """Extend a tensor along its token axis: [B, G, M, D] and new [B, G, N, D] -> [B, G, M + N, D]."""
        if name in self._state:
            old = self._state[name]
            if old.shape[0] != new.shape[0]:
                raise InputError(f"the cache holds a batch of {old.shape[0]}, the new tokens are {new.shape[0]}")
            new = torch.cat([old, new], dim=2)
        self._state[name] = new
        return new

    def reorder(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'], in that order, as a beam search chooses them."""
        self._state = {name: x[rows] for name, x in self._state.items()}

    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(x.numel() * x.element_size() for x in self._state.values())
