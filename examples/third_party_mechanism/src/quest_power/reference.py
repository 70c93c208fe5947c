"""The formula of power, to compare with."""

from quest_core.mechanisms import Tensor


def power(q: Tensor, k: Tensor, p: float) -> Tensor:
    """q [B, H, N, D], k [B, H, M, D] -> logits [B, H, N, M]; `p` is the option."""
    return (q[:, :, :, None] * k[:, :, None].sign() * k[:, :, None].abs() ** p).sum(-1)
