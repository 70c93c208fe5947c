"""A stand-in for Pointcept's SerializedAttention, which no package index has.

It answers the same call with the same parameters, written from the definition: one cloud, one patch and one head at a
time, in loops. What is tested against it is tested against Pointcept's own class in test_pointcept.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def patches_by_definition(counts: Sequence[int], size: int) -> list[tuple[list[int], list[int]]]:
    """The positions on the curve that each patch of clouds of `counts` points holds, and those of them it is for."""
    patches, begin = [], 0
    for n in counts:
        for first in range(0, n, size):
            own = list(range(begin + first, begin + min(first + size, n)))
            lent = [] if n <= size else list(range(begin + first + len(own) - size, begin + first))
            patches.append((own + lent, own))
        begin += n
    return patches


class Point(dict):
    """Points with attributes that are keys, as Pointcept passes them along."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RelativeBias(nn.Linear):
    """A learned bias for each head, here linear in the difference of grid coordinates."""

    def forward(self, relative: Tensor) -> Tensor:
        """[P, K, K, 3] -> [P, H, K, K]."""
        return super().forward(relative.to(self.weight.dtype) / 10).permute(0, 3, 1, 2)


class Rotary(nn.Module):
    """Rotary positions in three dimensions: each third of a head turns with one coordinate."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        third = head_dim // 3
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, third, 2).float() / third))

    def forward(self, q: Tensor, k: Tensor, coord: Tensor) -> tuple[Tensor, Tensor]:
        """[S, H, D] -> [S, H, D]."""
        angle = (coord[:, :, None] * self.inv_freq)[:, None]  # [S, 1, 3, D/6]

        def turn(x: Tensor) -> Tensor:
            one, two = x.unflatten(2, (3, 2, -1)).unbind(3)  # [S, H, 3, D/6]
            turned = torch.stack([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], 3)
            return turned.flatten(2)

        return turn(q), turn(k)


class SerializedAttention(nn.Module):
    """Attention inside patches of a curve, as PT-v3 defines it; `enable_flash` keeps small clouds as they are."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        patch_size: int,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        order_index: int = 0,
        enable_rpe: bool = False,
        enable_flash: bool = False,
        upcast_attention: bool = False,
        upcast_softmax: bool = False,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        self.channels, self.num_heads, self.order_index = channels, num_heads, order_index
        self.scale = (channels // num_heads) ** -0.5
        self.enable_flash, self.upcast_attention, self.upcast_softmax = enable_flash, upcast_attention, upcast_softmax
        if enable_flash:
            self.patch_size: int = patch_size
            self.attn_drop: Any = attn_drop
        else:
            self.patch_size_max, self.patch_size = patch_size, 0
            self.attn_drop = nn.Dropout(attn_drop)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(proj_drop)
        self.rpe = RelativeBias(3, num_heads) if enable_rpe else None
        if rotary:
            self.rope = Rotary(channels // num_heads)

    def forward(self, point: Any) -> Any:
        counts = point.offset.diff(prepend=point.offset.new_zeros(1)).tolist()
        size = self.patch_size if self.enable_flash else min(self.patch_size_max, *counts)
        order = point.serialized_order[self.order_index]
        patches = patches_by_definition(counts, size)
        taken = [order[held] for held, _ in patches]
        qkv = self.qkv(point.feat)
        weights, values = [], []
        for points in taken:
            q, k, v = qkv[points].unflatten(1, (3, self.num_heads, -1)).unbind(1)  # [K, H, D]
            if hasattr(self, "rope"):
                q, k = self.rope(q, k, point.coord[points])
            logits = torch.einsum("nhd,mhd->hnm", q * self.scale, k)
            if self.rpe is not None:
                grid = point.grid_coord[points]
                logits = logits + self.rpe((grid[:, None] - grid[None])[None])[0]
            weights.append(logits.softmax(-1))
            values.append(v)
        if not self.enable_flash:  # drawn at once for all patches
            weights = list(self.attn_drop(torch.stack(weights)))
        rows: list[Tensor] = []
        for weight, v, (_, own) in zip(weights, values, patches, strict=True):
            rows.append(torch.einsum("hnm,mhd->nhd", weight, v).flatten(1)[: len(own)])
        on_curve = torch.cat(rows)
        point.feat = self.proj_drop(self.proj(on_curve[point.serialized_inverse[self.order_index]]))
        return point


class Block(nn.Module):
    """Normalized attention and a residual."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options["channels"])
        self.attn = SerializedAttention(**options)

    def forward(self, point: Any) -> Any:
        shortcut = point.feat
        point.feat = self.norm(shortcut)
        point = self.attn(point)
        point.feat = point.feat + shortcut
        return point


class Stages(nn.Module):
    """Two stages of two blocks, with patches of 8. The second has half of the points."""

    def __init__(self, channels: int = 24, heads: tuple[int, int] = (4, 2), **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(4, channels)
        for stage, count in enumerate(heads):
            sizes = {"channels": channels, "num_heads": count, "patch_size": 8}
            blocks = {f"block{i}": Block(**sizes, order_index=i, **options) for i in (0, 1)}
            self.add_module(f"enc{stage}", nn.ModuleDict(blocks))

    def forward(self, x: Tensor, grid: Tensor, batch: Tensor) -> Tensor:
        feat = self.stem(x)
        keep = torch.arange(len(batch))
        for stage in range(2):
            point = serialized(feat, grid[keep], batch[keep])
            for block in getattr(self, f"enc{stage}").values():
                point = block(point)
            feat = point.feat
            if stage == 0:
                feat, keep = feat[::2], keep[::2]
        return feat


def serialized(feat: Tensor, grid: Tensor, batch: Tensor) -> Point:
    """A Point with two curves: x before y before z, and the other way round."""
    extent = 64
    scale = torch.tensor([[extent**2, extent, 1], [1, extent, extent**2]])
    code = batch * extent**3 + (scale[:, None] * grid).sum(2)  # [2, N]
    order = code.argsort(1)
    return Point(
        feat=feat,
        grid_coord=grid,
        coord=grid.to(feat.dtype) / 10,
        batch=batch,
        offset=batch.bincount().cumsum(0),
        serialized_order=order,
        serialized_inverse=order.argsort(1),
    )
