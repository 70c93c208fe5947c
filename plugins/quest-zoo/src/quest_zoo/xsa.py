"""Exclusive self-attention: the output of a token has no share of its own value."""

from torch import Tensor

from quest_core import Option, Output, register
from quest_core.mechanisms import Dims, naive, unit

ALPHA = Option("alpha", float, 1.0, "α, the share of the own value that is taken out", 0)


@register("xsa", source="Apple, 2026: arXiv 2603.09078", options=(ALPHA,))
class ExclusiveOutput(Output):
    """y_i ← y_i − α (y_i · v̂_i) v̂_i, v̂ = v / ‖v‖."""

    causal = cached = True
    reads = ("unseen",)  # the own value counts where a mask hides it, too

    def __init__(self, dims: Dims | None, *, alpha: float) -> None:
        super().__init__(dims)
        self.alpha = alpha

    def change(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        own = unit(v[:, :, v.shape[2] - out.shape[2] :])  # queries are the last tokens
        own = own.repeat_interleave(out.shape[1] // own.shape[1], 1) if own.shape[1] != out.shape[1] else own
        return out - self.alpha * (out * own).sum(-1, keepdim=True) * own

    def reference(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        own = naive.unit(v[:, :, v.shape[2] - out.shape[2] :])
        return out - self.alpha * (out[..., None, :] @ own[..., None])[..., 0] * own
