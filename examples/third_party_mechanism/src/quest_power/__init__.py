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

    @staticmethod
    def reference(q: Tensor, k: Tensor, p: float) -> Tensor:
        """Return the logits [B, H, N, M] of q [B, H, N, D] and k [B, H, M, D]."""
        return (q[:, :, :, None] * k[:, :, None].sign() * k[:, :, None].abs() ** p).sum(-1)
