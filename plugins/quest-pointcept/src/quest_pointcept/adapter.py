"""PointceptAdapter: finds serialized attention, replaces it, and lets the hosts accept `attention=`."""

import inspect
import re
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quest_core.drafts import host_class
from quest_core.hosts.adapter import Adapter, HostAttention, Site

from . import hosts, watching
from .layers import LiteAttention, PointAttention, TensorAttention


class PointceptAdapter(Adapter):
    """Every serialized attention of Point Transformer V3 and LitePT: Pointcept's, torch-pointcloud's and copies."""

    name: ClassVar[str] = "pointcept"

    def replacement(self, module: nn.Module) -> type[HostAttention] | None:
        """Return the class that replaces a module, or None if it is not a serialized attention.

        Pointcept's file is copied into many repositories under many names, so its class is recognized by its own name.
        """
        kind: Any = host_class(module)
        if kind.__module__ == hosts.TORCH_POINTCLOUD and kind.__name__ in hosts.ATTENTION[hosts.TORCH_POINTCLOUD]:
            return TensorAttention
        named = {"SerializedAttention": PointAttention, "PointROPEAttention": LiteAttention}.get(kind.__name__)
        called_with_a_point = named and [*inspect.signature(kind.forward).parameters] == ["self", "point"]
        return named if called_with_a_point else None

    def site(self, path: str, module: nn.Module, kind: type[HostAttention], model: nn.Module) -> Site:
        """Return a site. The blocks of a stage are a stack: they have the same points and the same number of heads."""
        stage = re.sub(r"\d+(?=\D*$)", "*", path)  # enc.enc0.block1.attn -> enc.enc0.block*.attn
        return replace(super().site(path, module, kind, model), stack=stage)

    def kernel(self, site: Site, made: Any) -> str:
        return made.kernel  # type: ignore[no-any-return]

    def change_host(self) -> None:
        """Let the models of Pointcept and torch-pointcloud accept `attention=`."""
        hosts.install(self)
        watching.install(self.patches)
