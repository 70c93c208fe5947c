"""power: keys raised to a power, feature by feature, with their signs."""

from quest_core.mechanisms import POINTWISE, Dims, Option, Part, Score, Tensor

from .reference import power


class Power(Score):
    def __init__(self, dims: Dims | None, *, p: float) -> None:
        super().__init__(dims)
        self.p = p

    def key(self, k: Tensor) -> Tensor:
        return k.sign() * k.abs() ** self.p  # [B, G, M, D]


P = Option("p", float, 2.0, "the exponent; 1 leaves keys as they are", minimum=1)
PARTS = (Part("power", "score", "q · sign(k)|k|ᵖ", "a worked example", Power, (P,), power, **POINTWISE),)
