"""Cache: what one attention layer remembers between the steps of incremental decoding."""

import copy
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, UnsupportedError, check_sizes


class Cache:
    """The state of one attention layer while it decodes.

    Softmax and sigmoid attention keep ``k`` (as the score prepared it: unit vectors for quest) and ``v``,
    [B, G, tokens, D]; aft-full keeps keys and values too. These are written with `append`. A recurrent mechanism
    (linear, cosine, aft-simple, aft-local) keeps a state whose size does not grow, written as ``cache[name] = x``.

    Decode under ``torch.no_grad()`` or ``torch.inference_mode()``: where gradients are recorded, a step concatenates
    instead of writing in place.

    >>> cache = Cache(max_length=8192)
    >>> y = layer(prompt, is_causal=True, cache=cache)  # [B, N, E]
    >>> y = layer(token, is_causal=True, cache=cache)   # [B, 1, E]
    >>> cache.reorder(beams)                            # beam search: keep these rows of the batch, in this order
    >>> cache.crop(len(cache) - 3)                  # speculative decoding: forget the last 3 tokens

    Args:
        max_length: the most tokens. The first step allocates memory for all of them, later steps write into it. If
            None, the memory doubles when it is full.

    Attributes:
        tokens: how many tokens have been decoded.

    Raises:
        ConfigError: `max_length` is not a whole number of at least 1.
    """

    def __init__(self, max_length: int | None = None) -> None:
        check_sizes(max_length=max_length)
        self.max_length = max_length
        self.tokens = 0
        self._memory: dict[str, Tensor] = {}  # [B, G, capacity, D], of which the first `tokens` are filled
        self.states: dict[str, Tensor] = {}  # a step puts a new dict in its place
        self._owner: Any = None  # the mechanism whose tokens these are
        self._attention: object = ""  # its configuration, which copies keep
        # Batch, heads, features, type and device of "k" and "v".
        self._shapes: dict[str, tuple[int, int, int, torch.dtype, torch.device]] = {}
        self._in_place = True  # whether the memory is this cache's own, so that a step may write into it

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, name: str) -> Tensor:
        return self.states[name] if name in self.states else self._memory[name][:, :, : self.tokens]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.states = {**self.states, name: value}

    def __contains__(self, name: str) -> bool:
        return name in self.states or (name in self._memory and self.tokens > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}  # a copy may belong to a copy of the layer

    def admit(self, mechanism: Any, k: Tensor, v: Tensor, *, in_place: bool) -> None:
        """Begin a step of `mechanism` with new k [B, G, N, D] and v [B, G, N, Dv]; InputError if they do not fit.

        If `in_place`, `append` may write into memory that earlier steps have returned views of.
        """
        if self.tokens and self._owner not in (None, mechanism):
            raise InputError(
                f"the cache holds {self.tokens} tokens of another layer (attention '{self._attention}'); give each "
                "layer a Cache of its own"
            )
        total = self.tokens + k.shape[2]
        if self.max_length is not None and total > self.max_length:
            raise InputError(
                f"the cache holds {self.tokens} tokens and {k.shape[2]} new ones make {total}, more than its "
                f"max_length={self.max_length}; make it Cache(max_length={total}) or more, or Cache() to grow"
            )
        for name, x in (("k", k), ("v", v)):
            new = (x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)
            old = self._shapes.get(name, new)
            if self.tokens and old != new:
                meanings = ("a batch of {}", "{} heads", "{} features per head", "type {}", "device {}")
                text, have, got = next(row for row in zip(meanings, old, new, strict=True) if row[1] != row[2])
                raise InputError(
                    f"the cache holds {text.format(have)}, the new tokens are {got} ({name} of attention "
                    f"'{mechanism.config}'); start a new Cache, or reorder() this one if its batch has changed"
                )
            self._shapes[name] = new
        self._owner, self._attention = mechanism, mechanism.config
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in self._memory.values())
        self._in_place = in_place and not recorded

    def append(self, name: str, new: Tensor) -> Tensor:
        """Extend a tensor by `new` [B, G, N, D], once per step; return all of it [B, G, tokens + N, D], a view.

        Raises:
            InputError: earlier steps have not appended to `name`.
        """
        start, stop = self.tokens, self.tokens + new.shape[2]
        memory = self._memory.get(name)
        if start and (memory is None or memory.shape[2] < start):
            raise InputError(f"the cache holds {start} tokens that have no '{name}'; append to it in every step")
        if not self._in_place:
            whole = new if memory is None or not start else torch.cat([memory[:, :, :start], new], dim=2)
            self._memory[name] = whole
            return whole
        if memory is None or not self._fits(memory, new, stop):
            grown = new.new_empty(*new.shape[:2], self.max_length or max(stop, 2 * start), new.shape[3])
            if memory is not None and start:
                grown[:, :, :start] = memory[:, :, :start].detach()
            memory = self._memory[name] = grown
        memory[:, :, start:stop] = new.detach()
        return memory[:, :, :stop]

    def _fits(self, memory: Tensor, new: Tensor, stop: int) -> bool:
        """Return whether the tokens up to `stop` fit into this memory, which may be left from before a reset."""
        same = memory.shape[:2] == new.shape[:2] and memory.shape[3] == new.shape[3]
        same = same and (self.tokens > 0 or (memory.dtype == new.dtype and memory.device == new.device))
        return same and stop <= memory.shape[2] and (torch.is_inference_mode_enabled() or not memory.is_inference())

    def reorder(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'], in that order, as a beam search chooses them; a row may appear repeatedly.

        Raises:
            InputError: `rows` is not a vector of whole numbers.
        """
        if rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            raise InputError(f"rows is {rows.dtype} of shape {list(rows.shape)}; it is a vector of batch indices [B']")
        memories = {}
        for name, memory in self._memory.items() if self.tokens else ():
            old = memory[:, :, : self.tokens]  # [B, G, tokens, D]
            if self._in_place:
                memories[name] = memory.new_empty(rows.shape[0], *memory.shape[1:])
                torch.index_select(old, 0, rows, out=memories[name][:, :, : self.tokens])
            else:
                memories[name] = old.index_select(0, rows)
        self.states = {name: x.index_select(0, rows) for name, x in self.states.items()}
        self._memory = memories
        self._shapes = {name: (rows.shape[0], *shape[1:]) for name, shape in self._shapes.items()}

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; the memory stays.

        Raises:
            InputError: `tokens` is negative or more than there are.
            UnsupportedError: the mechanism keeps sums over all tokens, which lose no single ones.
        """
        if not 0 <= tokens <= self.tokens:
            raise InputError(f"crop({tokens}): the cache holds {self.tokens} tokens; choose 0 to {self.tokens}")
        if self.states and 0 < tokens < self.tokens:
            raise UnsupportedError(
                f"crop({tokens}): attention '{self._attention}' keeps sums over all {self.tokens} tokens; keep a "
                f"copy() of the cache at {tokens} tokens, or crop(0) and decode again"
            )
        if tokens == 0:
            self.states = {}
        if not self._in_place:  # no step may write into what is part of a graph
            self._memory = {name: x[:, :, :tokens] for name, x in self._memory.items()}
        self.tokens = tokens

    def reset(self) -> None:
        """Forget all tokens; the memory stays for the next sequences."""
        self.crop(0)

    def copy(self) -> "Cache":
        """Return an independent copy: steps of one do not change the other."""
        made = copy.copy(self)
        tensors = [*self._memory.values(), *self.states.values()]
        made.reorder(torch.arange(len(tensors[0]) if tensors else 0, device=tensors[0].device if tensors else None))
        return made

    @property
    def nbytes(self) -> int:
        """The bytes of memory held, including what is allocated for later tokens."""
        return sum(x.numel() * x.element_size() for x in (*self._memory.values(), *self.states.values()))
