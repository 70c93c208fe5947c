"""How the points of a batch, in the order of a space-filling curve, fall into the patches that attend.

Point Transformer V3 sorts the points of every cloud along a curve, cuts the sequence into patches of K points and lets
points attend inside their patch. A cloud of more than K points is filled up to whole patches: its last patch borrows
the missing points from the patch before, slot by slot, so that no mask is needed.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quest_core.tools.packing import PackingPlan


@dataclass(frozen=True)
class PatchLayout:
    """A layout of points that are in the order of a curve.

    Attributes:
        slots: [S], the position on the curve that each slot of the patches holds, cloud after cloud.
        rows: [N], the slot that each position on the curve takes its output from.
        size: slots of a patch if all patches have the same number, else None.
        plan: the starts of the patches, which may have different sizes.
        real: [P, K], False = padding; None without padding.
    """

    slots: Tensor
    rows: Tensor
    size: int | None
    plan: PackingPlan
    real: Tensor | None = None

    @functools.cached_property
    def padded(self) -> "PatchLayout":
        """The same patches filled up to the longest, with `real`: one dense batch."""
        lengths = torch.tensor(self.plan.lengths)[:, None]  # [P, 1]
        position = torch.arange(int(lengths.max()))
        real = position < lengths  # [P, K]
        start = lengths.cumsum(0) - lengths
        chosen = start + torch.minimum(position, lengths - 1)  # [P, K]: the slot, the patch's last one for padding
        place = real.flatten().nonzero().flatten()  # [S]: of each slot in the dense batch
        device = self.slots.device
        slots, rows = self.slots[chosen.flatten().to(device)], place.to(device)[self.rows]
        return PatchLayout(slots, rows, len(position), self.plan, real.to(device))


def lay_out(counts: Sequence[int], patch_size: int, device: torch.device) -> PatchLayout:
    """Cut clouds of `counts` points, at least one each, into patches of `patch_size`, or one that is shorter."""
    slots: list[Tensor] = []
    rows: list[Tensor] = []
    bounds = [0]
    begin = 0  # of the cloud on the curve
    for n in counts:
        filled = n if n <= patch_size else -(-n // patch_size) * patch_size
        position = torch.arange(filled)
        slots.append(begin + torch.where(position < n, position, position - patch_size))
        rows.append(bounds[-1] + position[:n])
        step = min(patch_size, filled)
        bounds += range(bounds[-1] + step, bounds[-1] + filled + 1, step)
        begin += n
    sizes = {b - a for a, b in itertools.pairwise(bounds)}
    plan = PackingPlan(torch.tensor(bounds, dtype=torch.int32, device=device), max_seqlen=max(sizes))
    size = sizes.pop() if len(sizes) == 1 else None
    return PatchLayout(torch.cat(slots).to(device), torch.cat(rows).to(device), size, plan)


def counts_of(point: Any) -> tuple[int, ...]:
    """Return the points of each cloud of a Pointcept `Point`, without empty clouds; copied from the device once."""
    key = "quest_counts"
    if key not in point:
        every = torch.diff(point["offset"], prepend=point["offset"].new_zeros(1)).tolist()
        point[key] = tuple(count for count in every if count)
    return point[key]


def patches_of(point: Any, patch_size: int) -> PatchLayout:
    """Return the layout of a Pointcept `Point`, made once for each set of points and patch size.

    Pointcept keeps one layout with the points, whatever the patch size: a decoder whose patches differ from those of
    its encoder then gets the encoder's padding. Here every size has its own.
    """
    key = f"quest_patches_{patch_size}"
    if key not in point:
        point[key] = lay_out(counts_of(point), patch_size, point["offset"].device)
    return point[key]
