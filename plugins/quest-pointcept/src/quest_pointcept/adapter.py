"""PointceptAdapter: finds serialized attention, replaces it, and lets the hosts accept `attention=`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal

from . import hosts
from .layers import FLASH, PointAttention, TensorAttention, rate


class PointceptAdapter(Adapter):
    """Every serialized attention of Point Transformer V3, in Pointcept, torch-pointcloud and standalone copies."""

    name: ClassVar[str] = "pointcept"
    capabilities: ClassVar[Capabilities] = Capabilities(narrows_keys=True)

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every serialized attention in `model`, in the order of registration, which is that of the forward pass.

        The blocks of a stage are a stack, because they have the same points and the same number of heads.
        """
        for path, module in model.named_modules():
            if _replacement(module) is None:
                continue
            host: Any = module
            rotary = getattr(host, "rope", None) is not None
            asked = Capabilities(narrows_keys=True, dropout=rate(host.attn_drop) > 0, rotary=rotary)
            stage = re.sub(r"\d+(?=\D*$)", "*", path)  # enc.enc0.block1.attn -> enc.enc0.block*.attn
            yield Site(path, module, host.num_heads, host.channels // host.num_heads, asked, stack=stage)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's own sub-modules around another mechanism; see quest_pointcept.layers."""
        made: Any = _replacement(site.module)
        return made.from_host(site, config)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why the host cannot honour `config`: a bias on the scores, or the size of a patch."""
        host: Any = site.module
        family = config.family
        flash = [name for name in FLASH if getattr(host, name, False)]
        for name in ("rpe", "upcast_attention", "upcast_attn", "upcast_softmax"):
            if flash and getattr(host, name, False):
                return f"{name} has no fused kernel; build with {flash[0]}=False"
        if family and getattr(host, "rpe", None) is not None:
            return f"the relative position bias is added to scores, and '{family}' has none; build without it"
        if any(part.on_grid for part in config.components):
            given = {key: config.option(key) for key in ("dims", "grid", "prefix")}
            if given != {"dims": 1, "grid": None, "prefix": 0}:
                return f"the points of a patch lie on a line; write {family}(dims=1), without grid and prefix"
        length, size = config.option("max_length"), getattr(host, "patch_size_max", host.patch_size)
        if length is not None and length < size:
            return f"patches have {size} points and max_length is {length}; write {config.name}(max_length={size})"
        return refusal(config, site.capabilities)

    def change_host(self) -> None:
        """Let the models of Pointcept and torch-pointcloud accept `attention=`."""
        hosts.install(self)


def _replacement(module: nn.Module) -> type[PointAttention] | type[TensorAttention] | None:
    """Return the class that replaces a module, or None if it is not a serialized attention.

    Pointcept's file is copied into many repositories under many names, so its class is recognized by its own name.
    """
    if isinstance(module, PointAttention | TensorAttention):
        return type(module)
    kind = type(module)
    if kind.__module__ == hosts.TORCH_POINTCLOUD and kind.__name__ in hosts.ATTENTION[hosts.TORCH_POINTCLOUD]:
        return TensorAttention
    if kind.__name__ == "SerializedAttention" and list(inspect.signature(kind.forward).parameters) == ["self", "point"]:
        return PointAttention
    return None
