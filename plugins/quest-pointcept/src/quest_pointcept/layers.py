"""Serialized attention with any mechanism: one implementation behind the calls of Pointcept and of torch-pointcloud.

A replacement holds the host's own sub-modules under the host's names (`qkv`, `proj`, `rpe`, `rope`). A host's state
dict loads strictly if the mechanism has no parameters of its own. With fewer key/value heads (gqa, mqa) or narrower
keys (aft-conv) `qkv` has fewer rows, and a host's checkpoint is pooled on load.

Where the host would call flash-attn, patches keep their own lengths and `quest_core.attention_packed` attends to them:
on a GPU from Ampere on by PyTorch's variable-length flash kernel, elsewhere in batches of patches of similar length.
flash-attn itself is not needed. Where the host multiplies matrices, all patches are equally long and share one batch.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quest_core.config import AttentionConfig
from quest_core.errors import InputError
from quest_core.hosts.replacement import HostAttention
from quest_core.mechanisms.elliptical import Elliptical
from quest_core.projections import Packed
from quest_core.tools.packing import PackingPlan, attention_packed, flash_runs

from .layout import Patches, counts_of, patches_of


class SerializedAttention(HostAttention):
    """What both hosts share: from the features of points [N, C] to attended features [N, C].

    Attributes:
        patch_size: K, the most points of a patch.
        flash_dtype: the type in which the host calls flash-attn; None where it multiplies matrices.
        packed: patches keep their own lengths, as in the host's flash path.
        rpe: the host's relative position bias, or None; `rope` its rotary positions, or None.
    """

    projections = Packed("qkv")

    @classmethod
    def from_host(cls, host: Any, config: AttentionConfig, fresh: bool) -> SerializedAttention:
        """Return a module with the attributes, sub-modules and parameters of `host`, which is not changed."""
        heads = host.num_heads
        made: Any = cls.adopt(
            host, config, num_heads=heads, head_dim=host.channels // heads, standard_scale=host.scale, fresh=fresh
        )
        made.head_dim = made.head_sizes.head_dim
        made.patch_size = getattr(host, "patch_size_max", host.patch_size)
        made.upcast = any(getattr(host, name, False) for name in ("upcast", "upcast_attention", "upcast_attn"))
        made.attn_drop, made.proj_drop = _dropout(host.attn_drop), _dropout(host.proj_drop)
        made.rpe, made.rope = getattr(host, "rpe", None), getattr(host, "rope", None)
        made.flash_dtype = made._flash_dtype()
        made.packed = made.flash_dtype is not None
        # A frozen encoder stays frozen, also where the mechanism learns.
        made.mechanism.requires_grad_(any(p.requires_grad for p in host.qkv.parameters()))
        made.chained = any(part.chained for part in config.specs())
        return made.train(host.training)  # type: ignore[no-any-return]

    def _flash_dtype(self) -> torch.dtype | None:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"channels={self.channels}, num_heads={self.num_heads}, patch_size={self.patch_size}"

    # --- attending -------------------------------------------------------------------------------------------------

    def attend(
        self,
        x: Tensor,
        patches: Patches,
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
        take = patches.slots if order is None else order[patches.slots]  # [S]: the point in each slot
        give = patches.rows if inverse is None else patches.rows[inverse]  # [N]: the slot of each point
        qkv = self.qkv(x)[take]  # [S, rows]
        q, k, v = qkv.split(self.head_sizes.widths, dim=1)
        q = q.unflatten(1, (self.num_heads, self.head_dim))  # [S, H, D]
        k = k.unflatten(1, (self.kv_heads, self.head_sizes.key_dim))  # [S, G, D]
        v = v.unflatten(1, (self.kv_heads, self.head_dim))  # [S, G, D]
        if self.rope is not None:
            assert coord is not None
            q, k = self.rope(q, k, coord[take])
            v = v.to(q.dtype)  # the angles are float32, whatever the features are
        dropout_p = self.attn_drop.p if self.training else 0.0
        with self._precision(q), self._arranged(take, give, patches):
            if self.upcast:
                q, k, v = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (q, k, v))
            if self.packed and not self.chained:
                out = attention_packed(q, k, v, self.mechanism, cu_seqlens=patches.plan, dropout_p=dropout_p)
            else:
                q, k, v = (part.unflatten(0, (-1, patches.size)).transpose(1, 2) for part in (q, k, v))  # [P, H, K, D]
                mask = bias
                if patches.real is not None:
                    mask = self.mechanism.padding_mask(patches.real, same_tokens=True)
                if dropout_p > 0:
                    # Drawn on the weights, as the host draws it: a seeded run drops the same ones.
                    out, _ = self.mechanism.forward_with_weights(q, k, v, attn_mask=mask, dropout_p=dropout_p)
                else:
                    out = self.mechanism(q, k, v, attn_mask=mask)
                out = out.transpose(1, 2).flatten(0, 1)  # [S, H, D]
        attended: Tensor = self.proj_drop(self.proj(out.flatten(1).to(qkv.dtype)[give]))
        return attended

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

    def _arranged(self, take: Tensor, give: Tensor, patches: Patches) -> AbstractContextManager[Any]:
        """Lets elliptical scores compare the values of the same point, which every block puts into another slot."""
        if not self.chained:
            return nullcontext()
        size, score = patches.size, self.mechanism.score
        assert isinstance(score, Elliptical)
        return score.arranged(
            to_tokens=lambda values: values.transpose(1, 2).flatten(0, 1)[give],  # [P, G, K, D] -> [N, G, D]
            from_tokens=lambda tokens: tokens[take].unflatten(0, (-1, size)).transpose(1, 2),
        )


def _dropout(given: nn.Module | float) -> nn.Dropout:
    """Hosts keep a dropout as a module or as its probability."""
    return given if isinstance(given, nn.Dropout) else nn.Dropout(float(given))  # type: ignore[arg-type]


class PointAttention(SerializedAttention):
    """For a SerializedAttention that is called with a `Point`: Pointcept's PT-v3m1, m2 and m3, and standalone copies.

    Attributes:
        order_index: which of the point's curves this block follows.
        shift_coords, jitter_coords, rescale_coords: how PT-v3m3 augments rotary positions while training.
    """

    @classmethod
    def from_host(cls, host: Any, config: AttentionConfig, fresh: bool) -> SerializedAttention:
        """As SerializedAttention's."""
        made: Any = super().from_host(host, config, fresh)
        # A learned position means something only while a patch has its size; without flash the host's patches shrink
        # to the smallest cloud of the batch.
        made.packed = made.packed or any(part.ordered for part in config.specs())
        return made  # type: ignore[no-any-return]

    def _flash_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.enable_flash else None

    def forward(self, point: Any) -> Any:
        """Attend to the features of a Point [N, C], in place; returns it."""
        size = self.patch_size if self.packed else min(self.patch_size, *counts_of(point))
        patches = patches_of(point, size)
        if self.chained and patches.size is None:
            patches = patches.padded
        order, inverse = point["serialized_order"][self.order_index], point["serialized_inverse"][self.order_index]
        bias = None if self.rpe is None else self.rpe(self._relative(point, order, patches))
        coord = None if self.rope is None else self._augmented(point["coord"])
        point.feat = self.attend(point.feat, patches, order, inverse, coord=coord, bias=bias)
        return point

    def _relative(self, point: Any, order: Tensor, patches: Patches) -> Tensor:
        """Differences of grid coordinates inside patches, [P, K, K, 3]; kept with the points for the other blocks."""
        key = f"quest_relative_{patches.size}_{self.order_index}"
        if key not in point:
            grid = point["grid_coord"][order[patches.slots]].unflatten(0, (-1, patches.size))  # [P, K, 3]
            point[key] = grid[:, :, None] - grid[:, None]
        relative: Tensor = point[key]
        return relative

    def _augmented(self, coord: Tensor) -> Tensor:
        """Coordinates [N, 3] for rotary positions: in training shifted, stretched and scaled as the host does."""
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


class TensorAttention(SerializedAttention):
    """For the SerializedAttention, -RPE and -RoPE of torch-pointcloud, which are called with tensors."""

    def _flash_dtype(self) -> torch.dtype | None:
        half = torch.float16 if self.rope is None else torch.bfloat16
        return half if self.use_flash_attn else None

    def patch_layout(self, batch: Tensor) -> MutableMapping[str, Any]:
        """torch-pointcloud's layout of its points, which the first block of a stage makes for all of them.

        Args:
            batch: the cloud of each point [N], sorted.
        """
        from torch_pointcloud.layers.serialized_attention import patch_layout

        mode = "above" if self.packed else "all"  # without flash the host fills small clouds up to a patch, too
        layout: MutableMapping[str, Any] = patch_layout(batch, self.patch_size, mode)
        return layout

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
            layout["patches"] = self._patches(layout)
        patches: Patches = layout["patches"]
        if self.chained and patches.size is None:
            patches = patches.padded
        bias = None
        if self.rpe is not None:
            if pos_grid is None:
                raise InputError("attn_kind='rpe' adds a bias by grid position: pass pos_grid [N, 3] to the model")
            take = patches.slots if serialized_order is None else serialized_order[patches.slots]
            bias = self.rpe(pos_grid[take].unflatten(0, (-1, self.patch_size)))
        return self.attend(x, patches, serialized_order, serialized_inverse, coord=pos, bias=bias)

    def _patches(self, layout: MutableMapping[str, Any]) -> Patches:
        plan = PackingPlan(layout["cu_seqlens"], max_seqlen_q=self.patch_size)
        size = None if self.packed else self.patch_size
        return Patches(layout["padded_indices"], layout["unpadded_indices"], size, plan)
