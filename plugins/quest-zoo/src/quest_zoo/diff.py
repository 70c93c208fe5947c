"""Differential attention: the weights of one head less those of another, in both published versions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quest_core import ConfigError, Normalizer, Option, Output, UnsupportedError, register
from quest_core.mechanisms import Dims, local, naive, wider
from quest_core.mechanisms.normalizers import Softmax
from quest_core.ops import visible

SHARE = Option("share", float, 0.8, "λ₀; the paper has 0.8 − 0.6 exp(−0.3 (l − 1)) in layer l")
FACTOR = Option("factor", float, 0.2, "the factor on the normalized pair, 1 − λ₀ in the paper")
EPS = 1e-5  # added to the mean square


def refuse_odd(name: str, heads: int) -> None:
    """Raise ConfigError if the heads do not come in pairs."""
    if heads % 2:
        raise ConfigError(f"attention '{name}' takes heads in pairs; {heads} heads are an odd number")


@register("diff", source="Differential Transformer V2, Microsoft, 2026")
class Difference(Output):
    """y_2h ← y_2h − σ(W_λ x)_h y_2h+1.

    Every second head is subtracted from the one before it. The difference stands in the places of both, because a
    host's output projection keeps its size; it acts as the sum of its two blocks. W_λ starts at 0, so λ at 1/2.
    """

    causal = cross = cached = learnable = needs_input = True
    reads = ("unseen", "group", "heads")

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        refuse_odd(self.name, dims.num_heads)
        self.share = nn.Linear(dims.num_heads * dims.head_dim, dims.num_heads // 2, bias=False)
        nn.init.zeros_(self.share.weight)

    def change(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        share = self.share(x).sigmoid().mT[..., None].to(out.dtype)  # [B, H/2, N, 1]
        return (out[:, ::2] - share * out[:, 1::2]).repeat_interleave(2, 1)

    def reference(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        share = torch.sigmoid(x @ self.share.weight.T).transpose(1, 2)[..., None]
        pairs = [out[:, 2 * h] - share[:, h] * out[:, 2 * h + 1] for h in range(out.shape[1] // 2)]
        return torch.stack([pair for pair in pairs for _ in range(2)], 1)


@register("diff-v1", source="Ye et al., 2024: arXiv 2410.05258, eq. 1 and 2", options=(SHARE,))
class DifferentialSoftmax(Softmax):
    """softmax(l_2h) − λ softmax(l_2h+1), λ = exp(a·b) − exp(c·d) + λ₀.

    Both heads of a pair get these weights, so their values act as one of twice the size. With `pair-norm` it is the
    paper's attention. a, b, c and d are learnable vectors of D features for all heads.
    """

    fused, learnable = False, True
    reads = ("tokens", "unseen", "group", "heads")

    def __init__(self, dims: Dims, *, share: float) -> None:
        super().__init__(dims)
        refuse_odd(self.name, dims.num_heads)
        self.start = share
        self.vectors = nn.Parameter(0.1 * torch.randn(4, dims.head_dim))

    def share(self) -> Tensor:
        """Return λ."""
        a, b, c, d = local(self.vectors)
        return (a * b).sum().exp() - (c * d).sum().exp() + self.start

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, **how: Any
    ) -> Tensor:
        own_masks = mask is not None and mask.dim() == 4 and mask.shape[1] > 1  # which may differ within a pair
        if own_masks or dropout_p or how["enable_gqa"]:
            plain: Any = {"scale": how["scale"], "dropout_p": dropout_p, "grouped": how["enable_gqa"]}
            return Normalizer.forward(self, q, k, v, mask=mask, is_causal=is_causal, **plain)
        values = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3).repeat_interleave(2, 1)  # [B, H, M, 2D], of a pair
        q, k = (F.pad(x, (0, max(0, 2 * v.shape[3] - x.shape[3]))) for x in (q, k))  # as many, for kernels of the CPU
        pairs = F.scaled_dot_product_attention(q, k, values, mask, 0.0, is_causal, **how).unflatten(1, (-1, 2))
        out = pairs[:, :, 0] - self.share().to(q.dtype) * pairs[:, :, 1]  # [B, H/2, N, 2D]
        return out.unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 2)

    def weights(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        pairs = super().weights(logits, mask).unflatten(1, (-1, 2))
        found = (pairs[:, :, 0] - self.share().to(logits.dtype) * pairs[:, :, 1]).repeat_interleave(2, 1)
        return found if mask is None else found.masked_fill(~visible(mask), 0)

    def reference(self, logits: Tensor, seen: Tensor) -> Tensor:
        one, other = (naive.softmax(logits[:, i::2], seen[:, i::2]) for i in (0, 1))
        a, b, c, d = self.vectors
        share = torch.exp(a @ b) - torch.exp(c @ d) + self.start
        return torch.stack([one - share * other] * 2, 2).flatten(1, 2) * seen


@register("pair-norm", source="Ye et al., 2024: arXiv 2410.05258, eq. 3", options=(FACTOR,))
class PairNorm(Output):
    """[y_2h, y_2h+1] ← (1 − λ₀) γ ⊙ [y_2h, y_2h+1] / rms.

    The root mean square is over the features of both heads, and one γ serves all pairs.
    """

    causal = cross = cached = learnable = True
    dropout = False  # a norm of what is left is not, on average, that of the whole
    reads = ("unseen", "group", "heads")

    def __init__(self, dims: Dims, *, factor: float) -> None:
        super().__init__(dims)
        refuse_odd(self.name, dims.num_heads)
        self.factor, self.gain = factor, nn.Parameter(torch.ones(2, dims.head_dim))

    def change(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        if out.shape[-1] != self.gain.shape[-1]:
            raise UnsupportedError(
                f"'{self.name}' has weights for heads of {self.gain.shape[-1]} features, and these values have "
                f"{out.shape[-1]}; choose another output where values are narrower or wider than queries"
            )
        pairs = out.to(wider(out.dtype)).unflatten(1, (-1, 2))  # [B, H/2, 2, N, D]
        inverse = (pairs.square().mean((2, 4), keepdim=True) + EPS).rsqrt()
        return (pairs * inverse * (self.factor * local(self.gain)[:, None])).flatten(1, 2).to(out.dtype)

    def reference(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        joined = torch.cat([out[:, ::2], out[:, 1::2]], -1)  # [B, H/2, N, 2D]
        joined = joined / (joined.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain.flatten() * self.factor
        return torch.stack(joined.chunk(2, -1), 2).flatten(1, 2)
