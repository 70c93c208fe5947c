"""Serialized attention with any mechanism: one implementation behind the calls of Pointcept and of torch-pointcloud.

A replacement holds the host's own sub-modules under the host's names (`qkv`, `proj`, `rpe`, `rope`). A host's state
dict loads strictly if the mechanism has no parameters of its own. With fewer key/value heads (gqa, mqa) or narrower
keys (aft-conv) `qkv` has fewer rows, and a host's checkpoint is pooled on load.

Where the host would call flash-attn, patches keep their own lengths and `quest_core.attention_packed` attends to them:
on a GPU from Ampere on by PyTorch's variable-length flash kernel, elsewhere in batches of patches of similar length.
flash-attn itself is not needed. Where the host multiplies matrices, all patches are equally long and share one batch.
"""

import math
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.errors import InputError
from quest_core.hosts.adapter import Capabilities, HostAttention, rate
from quest_core.projections import Packed
from quest_core.tools.packing import PackingPlan, attention_packed, flash_runs, varlen_computes

from .layout import PatchLayout, counts_of, patches_of

FLASH = ("enable_flash", "use_flash_attn")
"""The hosts' names of the option that asks for flash-attn."""


class SerializedAttention(HostAttention):
    """Shared by both hosts: from the features of points [N, C] to attended features [N, C].

    Attributes:
        patch_size: K, the most points of a patch.
        flash_dtype: the type in which the host calls flash-attn; None where it multiplies matrices.
        packed: patches keep their own lengths, as in the host's flash path.
        rpe: the host's relative position bias, or None; `rope` its rotary positions, or None.
    """

    projections = Packed("qkv")
    capabilities = Capabilities(narrows_keys=True)
    drops_weights = True

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Any]:
        """Return the heads and the factor on q·k."""
        heads = {"num_heads": host.num_heads, "head_dim": host.channels // host.num_heads}
        return {**heads, "standard_scale": host.scale}

    @classmethod
    def flash_type(cls, host: Any) -> torch.dtype | None:
        """Return the type in which a module calls flash-attn, which Pointcept's newest names; None if it does not."""
        flash = any(getattr(host, name, False) for name in FLASH)
        return (getattr(host, "flash_dtype", None) or torch.bfloat16) if flash else None

    @classmethod
    def asks(cls, host: Any, path: str, model: nn.Module) -> Capabilities:
        """Return what a module asks for: also rotary or relative positions, if it has some."""
        rotary, relative = (getattr(host, name, None) is not None for name in ("rope", "rpe"))
        return replace(super().asks(host, path, model), rotary=rotary, pairs=relative)

    @classmethod
    def refuses(cls, host: Any, path: str, config: AttentionConfig) -> str | None:
        """Return why the host cannot honor `config`: its kernels, or the size of a patch."""
        flash = [name for name in FLASH if getattr(host, name, False)]
        for name in ("rpe", "upcast_attention", "upcast_attn", "upcast_softmax"):
            if flash and getattr(host, name, False):
                return f"{name} has no fused kernel; build with {flash[0]}=False"
        if any(part.on_grid for part in config.components):
            given = {key: config.option(key) for key in ("dims", "grid", "prefix")}
            if given != {"dims": 1, "grid": None, "prefix": 0}:
                return f"the points of a patch lie on a line; write {config.family}(dims=1), without grid and prefix"
        length, size = config.option("max_length"), getattr(host, "patch_size_max", host.patch_size)
        if length is not None and length < size:
            return f"patches have {size} points and max_length is {length}; write {config.name}(max_length={size})"
        return None

    @classmethod
    def adopt(cls, host: Any, config: AttentionConfig, **sizes: Any) -> Any:
        """Return the draft of a replacement; see `HostAttention.adopt`."""
        made: Any = super().adopt(host, config, **sizes)
        made.patch_size = getattr(made, "patch_size_max", made.patch_size)
        made.upcast = any(getattr(made, name, False) for name in ("upcast_attention", "upcast_attn"))
        made.rpe, made.rope = getattr(made, "rpe", None), getattr(made, "rope", None)
        made.flash_dtype = cls.flash_type(host)
        # A learned position means something only while a patch has its size; without flash Pointcept's patches shrink
        # to the smallest cloud of the batch.
        ordered = hasattr(made, "enable_flash") and any("order" in part.reads for part in config.components)
        made.packed = ordered or made.flash_dtype is not None
        made.chained = any(part.chained for part in config.components)
        return made

    @property
    def kernel(self) -> str:
        """What attends in training on this machine.

        "varlen" is PyTorch's variable-length flash kernel, "buckets" are batches of patches of similar length, and
        "dense" is one batch of all patches.
        """
        if self.chained or not self.packed:
            return "dense"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype, sizes = self.flash_dtype or self.proj.weight.dtype, self.head_sizes
        shared = sizes.num_heads != sizes.kv_heads
        varlen = varlen_computes(self.mechanism, device, dtype, sizes.head_dim, shared, rate(self.attn_drop))
        return "varlen" if varlen else "buckets"

    def rotate(self, q: Tensor, k: Tensor, coord: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [S, H, D] and k [S, G, D] turned by positions [S, 3]."""
        return self.rope(q, k, coord)  # type: ignore[misc,no-any-return]

    def attend_to_patches(
        self,
        x: Tensor,
        patches: PatchLayout,
        order: Tensor | None,
        inverse: Tensor | None,
        *,
        coord: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention inside patches.

        Args:
            x: features of the points [N, C].
            patches: how the curve is cut.
            order: the point at each position of the curve [N]; None where points lie along it already.
            inverse: the position of each point on the curve [N].
            coord: where the points are [N, 3], for rotary positions.
            bias: added to the logits [P, H, K, K].

        Returns:
            [N, C].
        """
        whole = self.chained or any(layer.whole for layer in self.mechanism.monitor or ())
        if whole and patches.size is None:
            patches = patches.padded
        take = patches.slots if order is None else order[patches.slots]  # [S]: the point in each slot
        give = patches.rows if inverse is None else patches.rows[inverse]  # [N]: the slot of each point
        qkv = self.qkv(x)[take]  # [S, rows]
        q, k, v = (part.transpose(0, 1) for part in self.split_packed(qkv))  # q [S, H, D], k [S, G, Dk], v [S, G, D]
        if self.rope is not None:
            q, k = self.rotate(q, k, coord[take])  # type: ignore[index]
            v = v.to(q.dtype)  # the angles are float32, whatever the features are
        dropout_p = rate(self.attn_drop) if self.training else 0.0
        with self._precision(q), self._arrangement(take, give, patches):
            if self.upcast:
                q, k, v = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (q, k, v))
            if self.packed and not whole:
                out = attention_packed(q, k, v, self.mechanism, cu_seqlens=patches.plan, dropout_p=dropout_p)
            else:
                q, k, v = (part.unflatten(0, (-1, patches.size)).transpose(1, 2) for part in (q, k, v))  # [P, H, K, D]
                mask = bias
                if patches.real is not None:
                    mask = self.mechanism.padding_mask(patches.real, same_tokens=True)
                out = self.attend(q, k, v, mask, dropout_p=dropout_p).flatten(0, 1)  # [S, H·D]
        attended: Tensor = self.proj(out.reshape(len(qkv), -1).to(qkv.dtype)[give])
        return nn.functional.dropout(attended, rate(self.proj_drop), self.training)

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        """The type to attend in: float32 where the host upcasts, the host's half where flash kernels run.

        A GPU without flash kernels (before Ampere) has no bfloat16 arithmetic: there the caller's own type is kept.
        The keys' norms are float32 in every case, because the mechanism takes them before it casts. The host's
        `upcast_softmax` needs nothing: fused kernels sum the softmax in float32 always.
        """
        if self.upcast:
            return torch.autocast(x.device.type, enabled=False)
        if self.flash_dtype is not None and flash_runs(x.device, self.flash_dtype):
            return torch.autocast("cuda", dtype=self.flash_dtype)
        return nullcontext()

    def _arrangement(self, take: Tensor, give: Tensor, patches: PatchLayout) -> AbstractContextManager[Any]:
        """Lets elliptical scores compare the values of the same point, which every block puts into another slot."""
        if not self.chained:
            return nullcontext()
        score: Any = self.mechanism.score  # Elliptical
        return score.token_order(
            to_tokens=lambda values: values.transpose(1, 2).flatten(0, 1)[give],  # [P, G, K, D] -> [N, G, D]
            from_tokens=lambda tokens: tokens[take].unflatten(0, (-1, patches.size)).transpose(1, 2),
        )


class PointAttention(SerializedAttention):
    """For a SerializedAttention that is called with a `Point`: Pointcept's PT-v3m1, m2 and m3, and standalone copies.

    Attributes:
        order_index: which of the point's curves this block follows.
        shift_coords, jitter_coords, rescale_coords: how PT-v3m3 augments rotary positions while training.
    """

    def forward(self, point: Any) -> Any:
        """Attend to the features of a Point [N, C], in place; returns it."""
        size = self.patch_size if self.packed else min(self.patch_size, *counts_of(point))
        patches = patches_of(point, size)
        order, inverse = point["serialized_order"][self.order_index], point["serialized_inverse"][self.order_index]
        bias = None
        if self.rpe is not None:
            grid = point["grid_coord"][order[patches.slots]].unflatten(0, (-1, size))  # [P, K, 3]
            bias = self.rpe(grid[:, :, None] - grid[:, None])
        coord = None if self.rope is None else self.positions(point)
        point.feat = self.attend_to_patches(point.feat, patches, order, inverse, coord=coord, bias=bias)
        return point

    def positions(self, point: Any) -> Tensor:
        """Return coordinates [N, 3] for rotary positions: in training shifted, stretched and scaled as PT-v3m3 does."""
        coord: Tensor = point["coord"]
        if not self.training:
            return coord

        def draw(numbers: int, bound: float) -> Tensor:
            return torch.empty(numbers, device=coord.device, dtype=coord.dtype).uniform_(-bound, bound)

        shift, jitter, rescale = (getattr(self, f"{name}_coords", None) or 0 for name in ("shift", "jitter", "rescale"))
        if shift > 0:
            coord = coord + draw(3, shift)
        for numbers, factor in ((3, jitter), (1, rescale)):
            if factor > 1:
                coord = coord * draw(numbers, math.log(factor)).exp()
        return coord


class LiteAttention(PointAttention):
    """For LitePT's PointROPEAttention, which always calls flash-attn, and turns q and k by grid coordinates."""

    @classmethod
    def flash_type(cls, host: Any) -> torch.dtype:
        """Return float16."""
        return torch.float16

    def positions(self, point: Any) -> Tensor:
        """Return whole numbers [N, 3]."""
        return point["grid_coord"]  # type: ignore[no-any-return]

    def rotate(self, q: Tensor, k: Tensor, coord: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32, as LitePT turns them; its CUDA kernel writes into what it is given."""
        turned = (self.rope(x.float().transpose(0, 1)[None].clone(), coord[None])[0] for x in (q, k))  # type: ignore[misc]
        q, k = (x.transpose(0, 1) for x in turned)
        return q, k


class TensorAttention(SerializedAttention):
    """For the SerializedAttention, -RPE and -RoPE of torch-pointcloud, which are called with tensors."""

    @classmethod
    def flash_type(cls, host: Any) -> torch.dtype | None:
        """Return float16, or bfloat16 with rotary positions; None without flash-attn."""
        half = torch.float16 if getattr(host, "rope", None) is None else torch.bfloat16
        return half if host.use_flash_attn else None

    def patch_layout(self, batch: Tensor) -> MutableMapping[str, Any]:
        """torch-pointcloud's layout of its points, which the first block of a stage makes for all of them.

        Args:
            batch: the cloud of each point [N], sorted.
        """
        from torch_pointcloud.layers.serialized_attention import patch_layout

        # The host's `pad_mode` is of the model that was built, which is one without flash.
        return patch_layout(batch, self.patch_size, "above" if self.packed else "all")  # type: ignore[no-any-return]

    def forward(
        self,
        x: Tensor,
        pos_grid: Tensor | None,
        batch: Tensor,
        serialized_order: Tensor | None = None,
        serialized_inverse: Tensor | None = None,
        pos: Tensor | None = None,
        patch_layout: MutableMapping[str, Any] | None = None,
    ) -> Tensor:
        """Attention over points [N, C]; arguments as of the host's class.

        Raises:
            InputError: no `pos` for rotary positions, or no `pos_grid` for relative ones.
        """
        if self.rope is not None and pos is None:
            raise InputError("attn_kind='rope' turns queries and keys by position: pass pos [N, 3] to the model")
        layout = self.patch_layout(batch) if patch_layout is None else patch_layout
        if "patches" not in layout:
            plan = PackingPlan(layout["cu_seqlens"], max_seqlen=self.patch_size)
            size = None if self.packed else self.patch_size
            layout["patches"] = PatchLayout(layout["padded_indices"], layout["unpadded_indices"], size, plan)
        patches: PatchLayout = layout["patches"]
        bias = None
        if self.rpe is not None:
            if pos_grid is None:
                raise InputError("attn_kind='rpe' adds a bias by grid position: pass pos_grid [N, 3] to the model")
            take = patches.slots if serialized_order is None else serialized_order[patches.slots]
            bias = self.rpe(pos_grid[take].unflatten(0, (-1, self.patch_size)))
        return self.attend_to_patches(x, patches, serialized_order, serialized_inverse, coord=pos, bias=bias)
