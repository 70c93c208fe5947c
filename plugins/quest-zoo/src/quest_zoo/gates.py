"""Gates that read the layer's input: on the output, and on what is forgotten."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quest_core import Cache, Option, Output, ScoreMod, register
from quest_core.mechanisms import Dims, wider

PER = Option("per", str, "head", "what has a gate of its own", choices=("head", "feature"))
START = Option("bias", float, 4.0, "starting value of b_h; with 4, a token keeps 98 % per step", starts="own")


@register("gate", source="Qiu et al., 2025: arXiv 2505.06708; Qwen3-Next", options=(PER,))
class Gate(Output):
    """y_h ← y_h ⊙ σ(W_g x).

    A gate per head, or per feature of each head. It starts at 1/2.
    """

    causal = cross = cached = learnable = needs_input = True
    reads = ("group", "heads")  # x holds what all heads are made of

    def __init__(self, dims: Dims, *, per: str) -> None:
        super().__init__(dims)
        width = dims.num_heads * dims.head_dim
        self.gate = nn.Linear(width, width if per == "feature" else dims.num_heads, bias=False)
        nn.init.zeros_(self.gate.weight)

    def change(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        gate = self.gate(x).sigmoid().unflatten(-1, (out.shape[1], -1))  # [B, N, H, 1 or D]
        return out * gate.transpose(1, 2).to(out.dtype)

    def reference(self, out: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        gate = torch.sigmoid(x @ self.gate.weight.T)  # [B, N, H or H·D]
        return out * gate.reshape(*x.shape[:2], out.shape[1], -1).transpose(1, 2)


@register("forget", source="Lin et al., 2025: arXiv 2503.02130, eq. 5", options=(START,))
class Forget(ScoreMod):
    """l_ij ← l_ij + Σ_{t=j+1..i} log σ(w_h · x_t + b_h).

    A fused kernel takes the bias as a mask. Without causality a later key is forgotten as an earlier one is.
    """

    causal = cached = fused = learnable = needs_input = True
    reads = ("tokens", "order", "queries", "unseen", "group", "heads")
    complexity = "O(N·M·D) time, O(N·M) memory for the bias"

    def __init__(self, dims: Dims, *, bias: float) -> None:
        super().__init__(dims)
        self.gate = nn.Linear(dims.num_heads * dims.head_dim, dims.num_heads)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, bias)

    def bias(self, q: Tensor, k: Tensor, x: Tensor | None, cache: Cache | None) -> Tensor:
        logs = F.logsigmoid(self.gate(x).to(wider(q.dtype))).mT[..., None]  # [B, H, N, 1]
        logs = logs if cache is None else cache.append("forget", logs)  # [B, H, M, 1]
        sums = logs.cumsum(2)
        return -(sums[:, :, k.shape[2] - q.shape[2] :] - sums.mT).abs().to(q.dtype)

    def reference(self, logits: Tensor, x: Tensor | None) -> Tensor:
        assert x is not None
        logs = torch.log(torch.sigmoid(x @ self.gate.weight.T + self.gate.bias)).transpose(1, 2)  # [B, H, N]
        sums = logs.cumsum(-1)
        return logits - (sums[..., :, None] - sums[..., None, :]).abs()
