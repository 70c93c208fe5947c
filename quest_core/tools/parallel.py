"""Several devices: heads divided among them (tensor parallelism).

Data parallelism (DistributedDataParallel, fully_shard) needs nothing from here: https://quest-attention.github.io/quest/distributed/
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import AttentionConfig
from ..errors import ConfigError, InputError, UnsupportedError
from ..layer import Attention
from ..mechanism import Mechanism
from ..mechanisms.base import Dims
from ..ops import local
from ..registry import READS

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
except ImportError as error:
    raise UnsupportedError(
        "quest_core.tools.parallel needs torch.distributed.tensor, which PyTorch 2.5 or newer has if it was built with "
        f"torch.distributed; {torch.__version__} is installed"
    ) from error


class HeadParallel(ParallelStyle):
    """Tensor parallelism for :class:`quest_core.Attention`: every rank of the mesh has its share of the heads.

    Keys are normalized, grouped and attended to within a head, so ranks communicate where any attention's do and
    nowhere else: one all-reduce after the output projection and, in the backward pass, one for the gradient of the
    input.

    >>> mesh = init_device_mesh("cuda", (4,))
    >>> parallelize_module(model, mesh, {"layers.*.attention": HeadParallel()})

    The parameters become DTensors; a mechanism's own (the scales of qknorm) are divided with the heads they belong to.
    A single key/value head (mqa) cannot be divided: every rank has it, and the gradients of its projections are summed.
    Dropout on the weights draws from each rank's own generator: seed the ranks differently around it, or leave it out.

    Args:
        input_layout: how the input [B, N, E] lies on the mesh: Replicate(), or Shard(1) for sequence parallelism.
        output_layout: how the output shall lie: Replicate() or Shard(1).

    Raises:
        UnsupportedError: by `parallelize_module`, for another module, or a mechanism that looks at all heads at once.
        ConfigError: by `parallelize_module`, for heads that the mesh does not divide.
    """

    def __init__(self, *, input_layout: Placement | None = None, output_layout: Placement | None = None) -> None:
        super().__init__()
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if not isinstance(module, Attention):
            raise UnsupportedError(
                f"HeadParallel divides quest_core.Attention, and here is {type(module).__name__}; where one weight "
                "packs queries, keys and values, a rank's heads are not consecutive rows of it, and a checkpoint of "
                "such shares would not fit the undivided module"
            )
        config, own = module.config, module.mechanism
        if own.head_share != (0, 1):
            raise InputError("the heads of this Attention are divided already")
        # With a single key/value head for several query heads, every rank holds a copy of it.
        shared = config.family is None and module.kv_heads == 1 < module.num_heads
        fixes = {"heads": "gqa or mha, or divide the data"}
        if shared:
            fixes["group"] = f"a number of kv_heads that {ranks} divides, or mqa"
        for part, read in itertools.product(config.components, fixes):
            if read in part.reads:
                raise UnsupportedError(
                    f"attention '{config}': '{part.name}' reads {READS[read]}, which tensor parallelism divides "
                    f"among ranks; choose {fixes[read]}"
                )
        whole = {name: module.get_submodule(name) for name in ("k_proj", "v_proj")} if shared else {}
        for name, projection in whole.items():
            if type(projection) is not nn.Linear:
                raise UnsupportedError(
                    f"attention '{config}': with one key/value head, {name} must be a torch.nn.Linear, and here is "
                    f"{type(projection).__name__}; divide the module before its projections are replaced"
                )
        for name, heads in (("num_heads", module.num_heads), ("kv_heads", module.kv_heads)):
            if heads % ranks and not (shared and name == "kv_heads"):
                raise ConfigError(
                    f"attention '{config}': {name} is {heads}, which {ranks} ranks do not divide; choose a mesh whose "
                    f"size divides {heads}"
                )
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # from torch 2.7 on
        shape = Dims(module.num_heads, module.kv_heads, module.head_dim)
        placements = {
            f"mechanism.{name}": Replicate() if axis is None else Shard(axis)
            for name, axis in head_axes(config, shape, shared).items()
        }
        for name, projection in whole.items():
            projection.__class__ = WholeLinear
            placements |= {f"{name}.{leaf}": Replicate() for leaf, _ in projection.named_parameters()}
        for name, placement in placements.items():
            owner, _, leaf = name.rpartition(".")
            parameter = module.get_parameter(name)
            divided = distribute_tensor(parameter, device_mesh, [placement], **source)
            module.get_submodule(owner).register_parameter(leaf, nn.Parameter(divided, parameter.requires_grad))
        own.head_share, own.keys_divided = (device_mesh.get_local_rank(), ranks), not shared
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj") if name not in whole
        }
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


class WholeLinear(nn.Linear):
    """A projection that every rank has whole; it returns the heads of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, N, D] of x [B, N, E], the same on all ranks; gradients are partial sums over the rank's heads."""
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


def head_axes(config: AttentionConfig, dims: Dims, shared_keys: bool = False) -> dict[str, int | None]:
    """Return the axis of each of a mechanism's parameters that counts heads; None if all heads share the parameter.

    It is the axis that doubles when the heads do; with `shared_keys` only the query heads.
    """
    kv_heads = dims.kv_heads if shared_keys else 2 * dims.kv_heads
    with torch.device("meta"):
        once = Mechanism(
            config, num_heads=dims.num_heads, head_dim=dims.head_dim, kv_heads=dims.kv_heads, projected=True
        )
        twice = Mechanism(
            config, num_heads=2 * dims.num_heads, head_dim=dims.head_dim, kv_heads=kv_heads, projected=True
        )
    wide = dict(twice.named_parameters())
    return {
        name: next((i for i, (a, b) in enumerate(zip(p.shape, wide[name].shape, strict=True)) if a != b), None)
        for name, p in once.named_parameters()
    }
