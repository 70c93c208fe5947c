"""What fairseq 0.12.2 needs and its later code does not: its encoder layers have a shortcut around the attention.

In evaluation a layer that has loaded a checkpoint hands its packed weights to a fused kernel of PyTorch, and never
calls its attention module. Layers with an attention of ours must not.
"""

from __future__ import annotations

from typing import Any

from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import nn

from .attention import Attention

_PACKED = [f"{module}_{kind}" for module in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]


def _get(layer: Any) -> bool:
    """What fairseq decided, and False while the attention is ours."""
    return layer.__dict__["can_use_fastpath"] and not isinstance(layer.self_attn, Attention)


def _set(layer: Any, value: bool) -> None:
    layer.__dict__["can_use_fastpath"] = value


def install() -> None:
    """Close the shortcut for layers with an attention of ours. Idempotent; does nothing where there is none."""
    layer: Any = TransformerEncoderLayerBase
    stock = vars(layer).get("_load_from_state_dict")
    if stock is None or hasattr(layer, "can_use_fastpath"):
        return

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if not isinstance(self.self_attn, Attention):
            stock(self, state_dict, prefix, *arguments)
            return
        # The packed weights are parameters that nothing reads here, and those of fewer key heads would not fit.
        state_dict.update({prefix + name: getattr(self, name).detach() for name in _PACKED})
        nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)

    layer._load_from_state_dict = _load_from_state_dict
    layer.can_use_fastpath = property(_get, _set)
