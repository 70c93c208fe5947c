"""PointceptAdapter: finds serialized attention, replaces it, and lets the hosts accept `attention=`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from quest_core.config import AttentionConfig
from quest_core.errors import ConfigError
from quest_core.hosts.adapter import Adapter, Capabilities, Site, refusal
from quest_core.mechanism import kv_heads

from . import hosts
from .info import INFO
from .layers import PointAttention, SerializedAttention, TensorAttention


class PointceptAdapter(Adapter):
    """Every serialized attention of Point Transformer V3, in Pointcept, torch-pointcloud and standalone copies."""

    name: ClassVar[str] = "pointcept"
    capabilities: ClassVar[Capabilities] = Capabilities(**INFO["capabilities"])

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Yield every serialized attention in `model`, in the order of registration, which is that of the forward pass.

        The blocks of a stage are a stack, because they have the same points and the same number of heads.
        """
        for path, module in model.named_modules():
            if _replacement(module) is None:
                continue
            host: Any = module
            drop = host.attn_drop.p if isinstance(host.attn_drop, nn.Dropout) else host.attn_drop
            asked = Capabilities(narrows_keys=True, dropout=drop > 0)
            stage = re.sub(r"\d+(?=\D*$)", "*", path)  # enc.enc0.block1.attn -> enc.enc0.block*.attn
            yield Site(path, module, host.num_heads, host.channels // host.num_heads, asked, stack=stage)

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the host's own sub-modules around another mechanism; see quest_pointcept.layers."""
        made = _replacement(site.module)
        assert made is not None
        return made.from_host(site.module, config, site.fresh)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return why the host cannot honour `config`: positions that act on scores, patch size, shape of `qkv`."""
        host: Any = site.module
        family = config.family
        if family and getattr(host, "rpe", None) is not None:
            return f"the relative position bias is added to scores, and '{family}' has none; build without it"
        if family in ("aft-simple", "aft-full", "aft-local", "aft-conv") and getattr(host, "rope", None) is not None:
            return f"rotary positions act where queries meet keys, and in '{family}' they do not; build without them"
        if family == "aft-conv":
            given = {key: config.option(key) for key in ("dims", "grid", "prefix")}
            if given != {"dims": 1, "grid": None, "prefix": 0}:
                return "the points of a patch lie on a line; write aft-conv(dims=1), without grid and prefix"
        length, size = config.option("max_length"), _patch_size(host)
        if length is not None and length < size:
            return f"patches have {size} points and max_length is {length}; write {family}(max_length={size})"
        if not _fits(host, config):
            return f"its qkv is {_describe(host.qkv)} and cannot be cut for fewer keys; choose the attention first"
        return refusal(config, site.capabilities)

    def install(self) -> None:
        """Let the models of Pointcept and torch-pointcloud, whichever can be imported, accept `attention=`.

        Raises:
            PluginError: no host is installed, or the installed one cannot be used.
        """
        hosts.install(self)


def _replacement(module: nn.Module) -> type[PointAttention] | type[TensorAttention] | None:
    """Return the class that replaces a module, or None if it is not a serialized attention.

    Pointcept's file is copied into many repositories under many names, so its class is recognised by its attributes.
    """
    if isinstance(module, PointAttention | TensorAttention):
        return type(module)
    kind = type(module)
    if kind.__module__ == hosts.TORCH_POINTCLOUD_ATTENTION and kind.__name__ in hosts.TORCH_POINTCLOUD_CLASSES:
        return TensorAttention
    known = ("qkv", "proj", "num_heads", "channels", "scale", "order_index", "enable_flash", "attn_drop", "proj_drop")
    if kind.__name__ != "SerializedAttention" or not all(hasattr(module, name) for name in known):
        return None
    return PointAttention if list(inspect.signature(kind.forward).parameters) == ["self", "point"] else None


def _fits(host: Any, config: AttentionConfig) -> bool:
    """Return whether `qkv` has the rows that `config` needs, or is a plain nn.Linear that can be cut to them."""
    try:
        groups = kv_heads(config, host.num_heads)
    except ConfigError:  # kv_heads is missing or does not divide; building the mechanism raises it
        return True
    narrow = any(part.key_features is not None for part in config.specs())
    if host.qkv.weight.shape[0] == 3 * host.channels:
        return type(host.qkv) is nn.Linear or (groups == host.num_heads and not narrow)
    return isinstance(host, SerializedAttention) and not narrow and host.kv_heads == groups


def _patch_size(host: Any) -> int:
    size: int = getattr(host, "patch_size_max", host.patch_size)
    return size


def _describe(qkv: nn.Module) -> str:
    weight: Any = qkv.weight
    return f"a {type(qkv).__name__} with {weight.shape[0]} rows"
