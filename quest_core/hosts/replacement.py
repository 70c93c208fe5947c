"""What replacements of a host's attention have in common."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import AttentionConfig
from ..errors import UnsupportedError
from ..mechanism import Mechanism, head_sizes
from ..ops import (
    merge_masks,
)
from ..projections import HeadSizes, Projected, shallow_copy

Made = TypeVar("Made", bound="HostAttention")


class HostAttention(Projected):
    """Base of replacements: inherit it, describe `projections`, and write `forward` with the arguments of the host."""

    mechanism: Mechanism

    @classmethod
    def adopt(
        cls: type[Made],
        host: nn.Module,
        config: AttentionConfig,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        standard_scale: float | None = None,
        fresh: bool = False,
    ) -> Made:
        """Return a module with the attributes, parameters and sub-modules of `host`, which is not changed.

        Args:
            host: the module to replace.
            config: the mechanism.
            num_heads, head_dim, value_dim: as in `quest_core.mechanism.head_sizes`.
            num_kv_heads: key/value heads of the host's own model; `num_heads` by default.
            standard_scale: the host's factor on q·k; 1/√D by default.
            fresh: the weights have only been initialized; see `quest_core.projections`.

        Raises:
            InputError: `host` is a replacement whose keys and values were reduced already.
        """
        made: Any = shallow_copy(host, cls)
        made.config = config
        made.head_sizes = head_sizes(config, num_heads, head_dim, value_dim, num_kv_heads)
        made.mechanism = mechanism_for(host, config, made.head_sizes, standard_scale)
        made.projections.shrink(made, made.head_sizes, fresh=fresh)
        return made  # type: ignore[no-any-return]


def mechanism_for(host: nn.Module, config: AttentionConfig, sizes: HeadSizes, scale: float | None) -> Mechanism:
    """Return a mechanism on the device, in the type and in the mode of the module that it becomes a part of.

    Args:
        host: the module.
        config: the mechanism.
        sizes: of its heads.
        scale: the host's factor on q·k; None for 1/√D.
    """
    heads = {"num_heads": sizes.num_heads, "head_dim": sizes.head_dim, "num_kv_heads": sizes.kv_heads}
    made = Mechanism(config, **heads, standard_scale=scale, projected=True)
    weight = next((p for p in host.parameters() if p.is_floating_point()), None)
    if weight is not None:
        made.to(device=weight.device, dtype=weight.dtype)
    return made.train(host.training)


def refuse_arguments(module: nn.Module, **given: Any) -> None:
    """Raise UnsupportedError if a call gives a replacement an argument that it does not use.

    Args:
        module: the replacement.
        given: the arguments by name; None and False count as not given.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{type(module).__name__} was given {name}, which it does not use yet; use it in its forward, or call "
                "the model without it"
            )


def one_mask(hidden: Tensor | None, real: Tensor | None) -> Tensor | None:
    """Return a host's two masks as one of quest_core: boolean (True = may attend) or additive; None without any.

    Args:
        hidden: the host's, boolean (True = hidden) or additive, broadcastable to [B, H, N, M].
        real: of the keys, boolean (False = padding) or additive, as `Mechanism.padding_mask` returns it.
    """
    mask = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
    return mask if real is None else merge_masks(mask, real)
