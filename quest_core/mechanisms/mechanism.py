"""Mechanism: one attention, ready to apply to q, k and v, composed of its parts."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..config import AttentionConfig, AttentionSpec
from ..errors import ConfigError, InputError
from ..registry import parts
from .base import Dims, Grouping, Normaliser, Score, apply_weights, logits


class AttentionMismatchWarning(UserWarning):
    """A checkpoint was trained with another mechanism than the one it is loaded into."""


class Mechanism(nn.Module):
    """softmax(score(q, k)) v and its relatives: the part of attention between the projections.

    Build it with :func:`mechanism`. It remembers its configuration in every state dict (as module metadata, so no
    key is added) and warns when a checkpoint of another mechanism is loaded.
    """

    score: Score
    normaliser: Normaliser
    grouping: Grouping

    def __init__(self, config: AttentionConfig, dims: Dims | None) -> None:
        super().__init__()
        self.config = config
        self.score = _build(config, "score", dims)
        self.normaliser = _build(config, "normaliser", dims)
        self.grouping = _build(config, "grouping", None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """The attention output.

        Args:
            q: [B, H, N, D].
            k: [B, G, M, D] and v: [B, G, M, Dv]; H is a multiple of G.
            attn_mask: boolean (True = may attend) or additive, [N, M] or broadcastable to [B, H, N, M].
            is_causal: query i sees keys j ≤ i + M − N, so that the last query sees every key.
            dropout_p: dropout on the weights; the caller passes 0 outside training.

        Returns:
            [B, H, N, Dv]; zeros for a query with no visible key.

        Raises:
            InputError: naming the shape or type that does not fit.
        """
        self._check(q, k, v, attn_mask, dropout_p)
        return self.attend(
            self.score.query(q), self.score.key(k), v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, dropout_p: float
    ) -> Tensor:
        """The output for queries and keys that the score has prepared already (as a cache holds them)."""
        scale = self.score.scale(q.shape[-1])
        return self.normaliser(q, k, v, scale=scale, mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)  # type: ignore[no-any-return]

    def forward_with_weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The output and the weights [B, H, N, M] that made it (after dropout), by the plain formula.

        Arguments as in `forward`.
        """
        self._check(q, k, v, attn_mask, dropout_p)
        weights = self.normaliser.weights(self.logits(q, k), mask=attn_mask, is_causal=is_causal)
        weights = torch.dropout(weights, dropout_p, dropout_p > 0)
        return apply_weights(weights, v), weights

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """The logits [B, H, N, M] before any mask: q [B, H, N, D], k [B, G, M, D]."""
        return logits(self.score.query(q), self.score.key(k), self.score.scale(q.shape[-1]))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> None:
        check_inputs(q, k, v, mask, dropout_p)
        if why := self.grouping.mismatch(q.shape[1], k.shape[1]):
            raise InputError(f"attention '{self.config}': {why}")

    def extra_repr(self) -> str:
        return str(self.config)

    # A state dict's metadata travels with torch.save and adds no key, so host checkpoints still load strictly.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["attention"] = str(self.config)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        trained = local_metadata.get("attention")
        if trained is not None and trained != str(self.config):
            warnings.warn(
                f"this checkpoint was trained with attention '{trained}' and is being loaded into "
                f"'{self.config}'; build the model with attention='{trained}' to evaluate it as trained",
                AttentionMismatchWarning,
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


def _build(config: AttentionConfig, axis: str, dims: Dims | None) -> Any:
    part = parts()[config[axis]]
    arguments = config.build_arguments(part)
    return part.build(**arguments) if axis == "grouping" else part.build(dims, **arguments)


def mechanism(attention: AttentionSpec, *, num_heads: int, head_dim: int) -> Mechanism:
    """Build the mechanism that a specification names.

    Args:
        attention: a name, mapping or AttentionConfig; see :class:`quest_core.AttentionConfig`.
        num_heads: query heads H.
        head_dim: features D of a query/key head.

    Raises:
        ConfigError: for an unknown name or option, or heads that kv_heads does not divide.
    """
    config = AttentionConfig.parse(attention)
    return Mechanism(config, Dims(num_heads, kv_heads(config, num_heads), head_dim))


def kv_heads(attention: AttentionSpec, num_heads: int) -> int:
    """The number of key/value heads G that `attention` uses for `num_heads` query heads."""
    config = AttentionConfig.parse(attention)
    if config.family:
        return num_heads
    grouping: Grouping = _build(config, "grouping", None)
    return grouping.kv_heads(num_heads)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: AttentionSpec = "quest",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention with any mechanism that has no parameters of its own.

    >>> out = attention(q, k, v, "quest", is_causal=True)

    Args:
        q: queries [B, H, N, D].
        k: keys [B, G, M, D], G a divisor of H (G < H needs a grouping such as "quest+gqa").
        v: values [B, G, M, Dv].
        attention: a name, a mapping or an AttentionConfig.
        attn_mask: boolean (True = may attend) or additive, [N, M] or broadcastable to [B, H, N, M].
        is_causal: query i sees keys j ≤ i + M − N, so that the last query sees every key.
        dropout_p: dropout on the weights.

    Returns:
        [B, H, N, Dv]; zeros for a query with no visible key.

    Raises:
        ConfigError: unknown name or option, or a mechanism with learnable parameters.
        InputError: wrong shapes, types or mask.
    """
    if isinstance(attention, dict):
        attention = AttentionConfig.parse(attention)
    return _stateless(attention).forward(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)


@functools.cache
def _stateless(spec: str | AttentionConfig) -> Mechanism:
    config = AttentionConfig.parse(spec)
    for part in config.specs():
        if part.learnable:
            raise ConfigError(
                f"attention '{config}': '{part.name}' has learnable parameters, which a function cannot keep; build "
                f"it once, m = quest_core.mechanism('{config}', num_heads=..., head_dim=...), and call m(q, k, v)"
            )
    return Mechanism(config, None)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> None:
    """Raise InputError unless q, k, v and mask fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InputError(f"{name} has shape {list(x.shape)}; it needs four axes: batch, heads, tokens, features")
        if not x.is_floating_point():
            raise InputError(f"{name} is {x.dtype}; attention needs a floating-point type")
        if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise InputError(f"q is {q.dtype} but {name} is {x.dtype}; convert them to one type")
        if x.device != q.device:
            raise InputError(f"q is on {q.device} but {name} is on {x.device}")
    batch, heads, n, dim = q.shape
    m = k.shape[2]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise InputError(f"batch sizes differ: q {batch}, k {k.shape[0]}, v {v.shape[0]}")
    if k.shape[-1] != dim:
        raise InputError(f"q has {dim} features a head, k has {k.shape[-1]}; they meet in a dot product")
    if v.shape[1:3] != k.shape[1:3]:
        raise InputError(f"k has (heads, tokens) {tuple(k.shape[1:3])} but v has {tuple(v.shape[1:3])}")
    if not 0 <= dropout_p < 1:
        raise InputError(f"dropout_p is {dropout_p}; it is a probability in [0, 1)")
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise InputError(f"attn_mask is {mask.dtype}; it is boolean (True = may attend) or additive floating point")
        if mask.dim() not in (2, 4) or any(
            have not in (1, want) for have, want in zip(reversed(mask.shape), (m, n, heads, batch), strict=False)
        ):
            raise InputError(
                f"attn_mask has shape {list(mask.shape)}; it needs [N, M] = [{n}, {m}] or something that broadcasts to "
                f"[B, H, N, M] = [{batch}, {heads}, {n}, {m}] (a mask per sample [B, N, M] is written mask[:, None])"
            )
