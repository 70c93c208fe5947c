"""Tensor parallelism: heads divided among devices. Data parallelism needs nothing from here.

https://quest-attention.github.io/quest/distributed/
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..config import AttentionConfig
from ..errors import ConfigError, InputError, UnsupportedError
from ..layer import Attention
from ..mechanism import Mechanism
from ..mechanisms.base import Dims
from ..registry import READS


class HeadParallel(ParallelStyle):
    """Tensor parallelism for :class:`quest_core.Attention`: every rank of the mesh has its share of the heads.

    Keys are normalized, grouped and attended to within a head. So ranks communicate only for the output projection, by
    one all-reduce, and in the backward pass by one for the gradient of the input.

    >>> mesh = init_device_mesh("cuda", (4,))
    >>> parallelize_module(model, mesh, {"layers.*.attention": HeadParallel()})

    The parameters become DTensors; a mechanism's own (the scales of qknorm) are divided with the heads they belong to.
    Dropout on the weights draws from each rank's own generator: seed the ranks differently around it, or leave it out.

    Args:
        input_layout: how the input [B, N, E] lies on the mesh: Replicate(), or Shard(1) for sequence parallelism.
        output_layout: how the output shall lie: Replicate() or Shard(1).

    Raises:
        UnsupportedError: by `parallelize_module`, for another module, or a mechanism that looks at all heads at once.
        ConfigError: by `parallelize_module`, for heads or key/value heads that the mesh does not divide.
    """

    def __init__(self, *, input_layout: Placement | None = None, output_layout: Placement | None = None) -> None:
        super().__init__()
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if not isinstance(module, Attention):
            raise UnsupportedError(
                f"HeadParallel divides quest_core.Attention, and here is {type(module).__name__}, whose weights may "
                "pack queries, keys and values"
            )
        config, own = module.config, module.mechanism
        if own.head_share != (0, 1):
            raise InputError("the heads of this Attention are divided already")
        for part in config.components:
            if "heads" in part.reads:
                raise UnsupportedError(
                    f"attention '{config}': '{part.name}' reads {READS['heads']}, which lie on other ranks; choose gqa "
                    "or mha, or divide the data"
                )
        for name, heads in (("num_heads", module.num_heads), ("kv_heads", module.kv_heads)):
            if heads % ranks:
                raise ConfigError(
                    f"attention '{config}': {name} is {heads}, which {ranks} ranks do not divide; choose another mesh"
                )
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # from torch 2.7 on
        for name, axis in head_axes(config, Dims(module.num_heads, module.kv_heads, module.head_dim)).items():
            path, _, leaf = name.rpartition(".")
            owner, parameter = own.get_submodule(path), own.get_parameter(name)
            placement = Replicate() if axis is None else Shard(axis)
            divided = distribute_tensor(parameter, device_mesh, [placement], **source)
            owner.register_parameter(leaf, nn.Parameter(divided, parameter.requires_grad))
        own.head_share = (device_mesh.get_local_rank(), ranks)
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan["out_proj"] = RowwiseParallel(output_layouts=self.output_layout)
        parallelize_module(module, device_mesh, plan, **source)

        def place(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
            # Once for all three projections, so that their gradients are summed before they are communicated.
            placed = {name: self._place(x, device_mesh) for name, x in named.items() if name in ("x", "context")}
            return tuple(self._place(x, device_mesh) for x in arguments), named | placed

        module.register_forward_pre_hook(place, with_kwargs=True)
        return module

    def _place(self, x: Tensor | None, mesh: DeviceMesh) -> Tensor | None:
        """Return the whole of a local [B, N, E] on every rank, as a DTensor."""
        if x is None or isinstance(x, DTensor):
            return x
        placed = DTensor.from_local(x, mesh, [self.input_layout], run_check=False)
        return placed.redistribute(placements=[Replicate()])


def head_axes(config: AttentionConfig, dims: Dims) -> dict[str, int | None]:
    """Return the axis of each of a mechanism's parameters that counts heads; None if all heads share the parameter."""
    twofold = replace(dims, num_heads=2 * dims.num_heads, kv_heads=2 * dims.kv_heads)
    with torch.device("meta"):  # it is the axis that doubles when the heads do
        once, twice = (Mechanism(config, **vars(sizes), projected=True) for sizes in (dims, twofold))
    wide = dict(twice.named_parameters())
    return {
        name: next((i for i, (a, b) in enumerate(zip(p.shape, wide[name].shape, strict=True)) if a != b), None)
        for name, p in once.named_parameters()
    }
