"""MultiheadAttention: torch.nn.MultiheadAttention with another mechanism inside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compat import is_same
from .config import AttentionConfig, AttentionSpec
from .errors import InputError
from .mechanism import Mechanism, head_sizes
from .ops import mask_of_host
from .projections import Packed, Projected, Separate, init_norms


class MultiheadAttention(Projected, nn.MultiheadAttention):
    """Drop-in for :class:`torch.nn.MultiheadAttention`: same signature, parameter names, masks and outputs.

    Differences: `attention` names the mechanism; a query with no visible key gives zeros in place of NaN; `is_causal`
    works without an `attn_mask`; and with fewer key/value heads (gqa, mqa) or key features (aft-conv) the projections
    are smaller, and a checkpoint of the full size is pooled on load.

    None of PyTorch's native fast paths, which read the weights and bypass `forward`, can apply to it.
    """

    projections = (
        Packed("in_proj_weight", "in_proj_bias")
        + Separate("q_proj_weight", "k_proj_weight", "v_proj_weight")
        + Separate(k="bias_k", v="bias_v")
    )

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        attention: AttentionSpec = "quest",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.config = AttentionConfig.parse(attention)
        self.head_sizes = head_sizes(self.config, num_heads, self.head_dim)
        self.projections.shrink(self, self.head_sizes, fresh=True)
        self.mechanism = Mechanism(self.config, num_heads=num_heads, head_dim=self.head_dim, projected=True)
        self.mechanism.to(device=device, dtype=dtype)
        leave_native_path(self.mechanism)
        if not self.out_proj.weight.is_meta:
            init_norms(self)

    def _reset_parameters(self) -> None:
        """Start the parameters as torch.nn.MultiheadAttention does; hosts call this when they reset their layers."""
        super()._reset_parameters()
        if "config" in self.__dict__:  # torch.nn.MultiheadAttention.__init__ calls this first
            self.mechanism.reset_parameters()
            init_norms(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as torch.nn.MultiheadAttention does (masks: True = hidden); `is_causal` is aligned at the last query.

        Returns:
            The output in the layout of `query`, and the weights ([B, N, M] averaged over heads, [B, H, N, M] with
            ``average_attn_weights=False``) or None without ``need_weights``, which is the fast path.
        """
        if query.is_nested:
            if key is not query or value is not query or is_causal or not (attn_mask is key_padding_mask is None):
                raise InputError(
                    "nested tensors are taken for self-attention without masks, as nn.TransformerEncoder sends them; "
                    "pad them and pass key_padding_mask"
                )
            return self._forward_nested(query, need_weights, average_attn_weights)
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise InputError(
                f"query, key, value have {query.dim()}, {key.dim()}, {value.dim()} axes; all need 3, or 2 unbatched"
            )
        same_tokens, same_values = is_same(query, key), query is key is value
        batched = query.dim() == 3
        tokens = 1 if self.batch_first else 0  # the axis of the tokens; the other is the batch
        if not batched:
            query, key, value = (x.unsqueeze(1 - tokens) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        batch, n, m = query.shape[1 - tokens], query.shape[tokens], key.shape[tokens]

        # [B, N, H·D], [B, M, G·Dk], [B, M, G·D], or tokens first
        q, k, v = self._project(query, key, value, same_values)
        mask = self._visible(attn_mask, key_padding_mask, batch, n, m, same_tokens=same_tokens)
        causal = is_causal and (attn_mask is None or n == m)  # else the caller's mask may be aligned at the first query
        keys_only = key_padding_mask is None or self.mechanism.family is not None  # is_causal says all else
        if causal and attn_mask is not None and not need_weights and keys_only:
            # With is_causal the caller says that attn_mask is the causal mask, so it is left out.
            mask = self._visible(None, key_padding_mask, batch, n, m, same_tokens=same_tokens)
        q, k, v = (
            x.unflatten(2, (heads, -1)).permute(1 - tokens, 2, tokens, 3)
            for x, heads in ((q, self.num_heads), (k, self.kv_heads), (v, self.kv_heads))
        )  # [B, H, N, D], [B, G, M, Dk], [B, G, M, D]
        k, v = self._extend(k, v, causal)

        how: Any = {"attn_mask": mask, "is_causal": causal, "dropout_p": self.dropout if self.training else 0.0}
        how["x"] = query if self.batch_first else query.transpose(0, 1)  # [B, N, E]
        weights = None
        if need_weights:
            out, weights = self.mechanism.forward_with_weights(q, k, v, **how)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = self.mechanism(q, k, v, **how)
        if self.batch_first and not self.training:
            out = self.out_proj(out.transpose(1, 2).flatten(2))  # [B, N, E]
        else:
            # PyTorch's output lies tokens-first in memory, whatever batch_first says, and a dropout that follows
            # draws its random numbers in memory order: the same seed must give the same training.
            out = self.out_proj(out.permute(2, 0, 1, 3).flatten(2))  # [N, B, E]
            out = out.transpose(0, 1) if self.batch_first else out
        if not batched:
            return out.squeeze(1 - tokens), None if weights is None else weights.squeeze(0)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same_values: bool) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.head_sizes.widths
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and same_values:
            if self.batch_first and self.training and self.mechanism.is_standard:
                # PyTorch projects tokens-first, and sums the gradients of weight and bias in the order that follows.
                packed = F.linear(query.transpose(0, 1), self.in_proj_weight, bias)  # [N, B, 3·E]
                q, k, v = packed.unflatten(-1, (3, self.embed_dim)).permute(2, 0, 1, 3).contiguous().transpose(1, 2)
                return q, k, v
            packed = F.linear(query, self.in_proj_weight, bias)  # [B, N, (H + 2·G)·D]
            q, k, v = packed.split(sizes, dim=-1)
            return q, k, v
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        w_q, w_k, w_v = separate if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
        b_q, b_k, b_v = (None, None, None) if bias is None else bias.split(sizes)
        return F.linear(query, w_q, b_q), F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)

    def _visible(
        self, attn_mask: Tensor | None, padding: Tensor | None, batch: int, n: int, m: int, *, same_tokens: bool
    ) -> Tensor | None:
        """Return PyTorch's two masks (True = may not attend, or additive) as one of ours, for [B, H, N, M].

        M counts the keys of add_bias_kv and add_zero_attn too, which every query sees that is not padding.
        """
        rows = batch * self.num_heads
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, {"[N, M]": (n, m), "[B·H, N, M]": (rows, n, m)}, (1, n, m))
            if attn_mask.dim() == 3:
                shared = attn_mask.shape[0] == 1
                attn_mask = attn_mask[None] if shared else attn_mask.view(batch, self.num_heads, n, m)
        if padding is not None:
            _check_mask("key_padding_mask", padding, {"[B, M]": (batch, m)})
        if added := (self.bias_k is not None) + self.add_zero_attn:
            if attn_mask is not None:  # with keys behind the last that all queries see, no mask hides the future
                self.mechanism.refuse_future(mask_of_host(attn_mask))
            attn_mask, padding = (None if x is None else F.pad(x, (0, added)) for x in (attn_mask, padding))
        real = None
        if padding is not None:
            keys = ~padding if padding.dtype == torch.bool else padding
            real = self.mechanism.padding_mask(keys, same_tokens=same_tokens)
            real = real[:, :, :n] if added else real  # no query belongs to an added key
        return mask_of_host(attn_mask, real)

    def _extend(self, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Append the learned key/value (add_bias_kv) and the zero key/value (add_zero_attn).

        k: [B, G, M, Dk] -> [B, G, M + added, Dk], and v [B, G, M, D] alike.
        """
        if causal and (self.bias_k is not None or self.add_zero_attn):
            raise InputError(
                "is_causal says nothing of the keys of add_bias_kv and add_zero_attn; pass an attn_mask without it"
            )
        if self.bias_k is not None and self.bias_v is not None:
            shape = (k.shape[1], 1, -1)
            learned = (b.view(shape).expand(k.shape[0], -1, -1, -1) for b in (self.bias_k, self.bias_v))
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), learned, strict=True))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    def _forward_nested(
        self, query: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Pad, attend and nest again: nn.TransformerEncoder gives a nested tensor when it evaluates with padding."""
        rows = list(query.unbind())
        padded = nn.utils.rnn.pad_sequence(rows, self.batch_first)  # [B, N, E], or tokens first
        lengths = torch.tensor([len(row) for row in rows], device=query.device)
        padding = torch.arange(int(lengths.max()), device=query.device) >= lengths[:, None]  # [B, N]
        out, weights = self.forward(padded, padded, padded, padding, need_weights, None, average_attn_weights)
        out = out if self.batch_first else out.transpose(0, 1)
        kept = [x[: len(row)] for x, row in zip(out, rows, strict=True)]
        # nested_tensor would cut them from the graph
        return torch.nested.as_nested_tensor(kept, layout=query.layout), weights


def leave_native_path(mechanism: Mechanism) -> None:
    """Give a mechanism a hook that does nothing, because nn.TransformerEncoderLayer bypasses layers without hooks."""
    mechanism.register_forward_pre_hook(_nothing)


def _nothing(module: nn.Module, inputs: Any) -> None:
    """Stand at module level, so that models with this hook can be pickled."""


def _check_mask(name: str, mask: Tensor, shapes: dict[str, tuple[int, ...]], *others: tuple[int, ...]) -> None:
    """Raise InputError unless a mask has one of the `shapes`, which the message names, or one of the others."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"{name} is {mask.dtype}; it is boolean (True = hidden) or additive floating point")
    # Sizes are written down only here, and compared by !=, because both an f-string and `in` fix them in a graph.
    if all([mask.shape != shape for shape in (*shapes.values(), *others)]):
        wanted = " or ".join(f"{axes} = {list(shape)}" for axes, shape in shapes.items())
        raise InputError(f"{name} has shape {list(mask.shape)}; it needs {wanted}")
