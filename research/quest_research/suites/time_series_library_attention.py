"""Run Time-Series-Library's run.py with another attention.

    python time_series_library_attention.py ATTENTION SEED [words for run.py]

The library's models build `AttentionLayer(FullAttention(...), d_model, heads)`. Each `FullAttention` in such a layer
becomes a mechanism of quest_core; projections stay. A model with any other attention is refused.
"""

from __future__ import annotations

import random
import runpy
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quest_core
from quest_core.errors import PluginError

SEED = 2021  # what run.py sets; a cell's seed is added


class LibraryAttention(nn.Module):
    """Take the place of the library's FullAttention.

    Args:
        stock: gives mask_flag (causal unless a mask is given), output_attention and the dropout.
        attention: the mechanism.
        heads, head_dim: of the layer around it.
    """

    def __init__(self, stock: Any, attention: str, heads: int, head_dim: int) -> None:
        super().__init__()
        self.mechanism = quest_core.Mechanism(attention, num_heads=heads, head_dim=head_dim)
        self.mask_flag, self.output_attention, self.dropout = stock.mask_flag, stock.output_attention, stock.dropout

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, tau: Any = None, delta: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """queries [B, N, H, D], keys and values [B, M, H, D] -> output [B, N, H, D] and weights or None."""
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))  # [B, H, N, D]
        masks: dict[str, Any] = {}
        if self.mask_flag:
            masks = {"is_causal": True} if attn_mask is None else {"attn_mask": ~attn_mask.mask}
        masks["dropout_p"] = self.dropout.p if self.training else 0.0
        weights = None
        if self.output_attention:
            out, weights = self.mechanism.forward_with_weights(q, k, v, **masks)
        else:
            out = self.mechanism(q, k, v, **masks)
        return out.transpose(1, 2).contiguous(), weights


def install(attention: str) -> None:
    """Patch the library, whose checkout is on sys.path: its AttentionLayer, and the construction of its experiments."""
    from exp.exp_basic import Exp_Basic
    from layers.SelfAttention_Family import AttentionLayer, FullAttention

    init, start = AttentionLayer.__init__, Exp_Basic.__init__

    def layer(self: Any, stock: Any, d_model: int, n_heads: int, *arguments: Any, **named: Any) -> None:
        init(self, stock, d_model, n_heads, *arguments, **named)
        if type(stock) is not FullAttention or stock.scale is not None:
            scaled = " with a scale of its own" if getattr(stock, "scale", None) is not None else ""
            raise PluginError(f"the model has a {type(stock).__name__}{scaled}; only FullAttention can be replaced")
        self.inner_attention = LibraryAttention(
            stock, attention, n_heads, self.query_projection.out_features // n_heads
        )

    def experiment(self: Any, args: Any) -> None:
        start(self, args)
        found = sum(isinstance(module, LibraryAttention) for module in self.model.modules())
        if not found:
            raise PluginError(
                f"model {args.model} has no AttentionLayer, so attention '{attention}' would have no effect"
            )
        quest_core.chain(self.model)
        print(f"attention={attention} in {found} modules (FullAttention)", flush=True)

    AttentionLayer.__init__, Exp_Basic.__init__ = layer, experiment


def main(attention: str, seed: int, words: list[str]) -> None:
    """Run run.py of the current folder with its seed raised by `seed`."""
    for owner, name in ((random, "seed"), (np.random, "seed"), (torch, "manual_seed")):
        given: Any = getattr(owner, name)
        setattr(owner, name, lambda value, given=given: given(value + seed if value == SEED else value))
    sys.path[0] = ""  # the links to the checkout, in place of this file's folder
    install(attention)
    sys.argv = ["run.py", *words]
    runpy.run_path("run.py", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
