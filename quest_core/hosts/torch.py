"""The adapter of plain PyTorch models."""

from typing import Any, ClassVar

from torch import nn

from ..config import AttentionConfig
from ..drafts import host_class
from ..errors import InputError
from ..multihead import MultiheadAttention, leave_native_path
from .adapter import Adapter, Capabilities, HostAttention


class TorchAttention(HostAttention, MultiheadAttention):
    """The drop-in, in the place of a host's torch.nn.MultiheadAttention. Hosts may override `forward`."""

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        # The name that nn.TransformerDecoderLayer gives it; its queries may come in order, which no mask of it says.
        cross = path.endswith("multihead_attn")
        return Capabilities(causal=cross, cross=cross, dropout=host.dropout > 0, hands_on_input=True)

    @classmethod
    def adopt(cls, host: nn.Module, config: AttentionConfig, **sizes: Any) -> "TorchAttention":
        """Return the draft of the drop-in; InputError if weights of `host` are parametrized."""
        known = {name for name, _ in cls.projections.entries}
        if host._parameters.keys() - known or nn.utils.parametrize.is_parametrized(host):
            raise InputError(
                "weights of this nn.MultiheadAttention are parametrized (weight_norm, ...); inject first, or undo that"
            )
        made = super().adopt(host, config, **sizes)
        leave_native_path(made.mechanism)
        return made


class TorchAdapter(Adapter):
    """Plain PyTorch models: every torch.nn.MultiheadAttention, also a subclass that inherits its forward."""

    name: ClassVar[str] = "torch"
    attention: ClassVar[type[TorchAttention]] = TorchAttention

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        kind: Any = host_class(module)
        forwards = {nn.MultiheadAttention.forward, MultiheadAttention.forward, self.attention.forward}
        known = issubclass(kind, nn.MultiheadAttention) and kind.forward in forwards
        return self.attention if known else None
