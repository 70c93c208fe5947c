"""Groupings: which key/value head a query head uses. [G] is Key-Driven GQA, Khan et al."""

from __future__ import annotations

from ..config import Option, Part
from ..errors import ConfigError
from .base import Dims, Grouping


class MultiHead(Grouping):
    """Every query head has a key/value head of its own."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__()

    def kv_heads(self, num_heads: int) -> int:
        return num_heads

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        if kv_heads == num_heads:
            return None
        return f"q has {num_heads} heads and k has {kv_heads}; for shared key heads add a grouping, as in 'quest+gqa'"


class Grouped(Grouping):
    """H/G consecutive query heads share a key/value head (Ainslie et al., 2023; [G], section 2)."""

    def __init__(self, dims: Dims | None, *, kv_heads: int | None) -> None:
        super().__init__()
        self.requested = kv_heads

    def kv_heads(self, num_heads: int) -> int:
        if self.requested is None:
            raise ConfigError("attention 'gqa' needs 'kv_heads', the number of key/value heads: write gqa(kv_heads=2)")
        if num_heads % self.requested:
            fitting = [str(g) for g in range(1, num_heads + 1) if num_heads % g == 0]
            raise ConfigError(
                f"attention 'gqa': kv_heads is {self.requested}, which does not divide the {num_heads} heads; "
                f"choose from: {', '.join(fitting)}"
            )
        return self.requested

    def mismatch(self, num_heads: int, kv_heads: int) -> str | None:
        if self.requested is not None and kv_heads != self.requested:
            return f"kv_heads is {self.requested}, but k has {kv_heads} heads"
        if kv_heads == 0 or num_heads % kv_heads:
            return f"q has {num_heads} heads, which the {kv_heads} key/value heads do not divide"
        return None


class MultiQuery(Grouped):
    """All query heads share one key/value head (Shazeer, 2019)."""

    def __init__(self, dims: Dims | None) -> None:
        super().__init__(dims, kv_heads=1)


PARTS = (
    Part("mha", "grouping", "one k/v head a query head", "Vaswani et al., 2017", MultiHead),
    Part(
        "gqa",
        "grouping",
        "H/G query heads share a k/v head",
        "Ainslie et al., 2023",
        Grouped,
        (Option("kv_heads", int, None, "number of key/value heads G; it divides the query heads", 1, nullable=True),),
        reshapes=True,
    ),
    Part("mqa", "grouping", "all query heads share one k/v head", "Shazeer, 2019", MultiQuery, reshapes=True),
)
