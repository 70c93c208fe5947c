"""A score of one's own for quest-core: the class, its promises, and the formula that tests compare it with."""

from torch import Tensor

from quest_core import Option, Score, register
from quest_core.mechanisms import Dims

P = Option("p", float, 2.0, "the exponent; 1 leaves keys as they are", minimum=1)


@register("power", source="a worked example", options=(P,))
class Power(Score):
    """q · sign(k)|k|ᵖ."""

    causal = cross = cached = True
    reads = ()  # each token of each head is prepared independently

    def __init__(self, dims: Dims | None, *, p: float) -> None:
        super().__init__(dims)
        self.p = p

    def key(self, k: Tensor) -> Tensor:
        return k.sign() * k.abs() ** self.p  # [B, G, M, D]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return (q[:, :, :, None] * k.sign()[:, head, None] * k.abs()[:, head, None] ** self.p).sum(-1)
