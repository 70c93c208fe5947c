"""Packed sequences: every mechanism equals a padded batch, or a loop, by its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import quest_core

from .cases import SUBJECTS, Cell, Made, Subject, bounds, compare


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.name != "quest+pgqa"], ids=lambda s: s.name)
def test_packed(subject: Subject) -> None:
    """Each sequence attends within itself: equal to a padded batch by the reference."""
    lengths = subject.lengths[:2] if subject.name == "aft-conv 2d" else (7, 1, 12, 5)
    for dtype in (torch.float64, torch.bfloat16):
        for is_causal in (False, True) if subject.causal else (False,):
            if "elliptical" in subject.name:
                continue  # a layer's values are handed on token by token; tests/test_elliptical.py has it
            made = Cell(subject, "packed", dtype, is_causal=is_causal).made()
            torch.manual_seed(made.seed)
            h, g, d, kd = made.heads, made.groups, made.dim, made.key_dim
            total = sum(lengths)
            both = torch.randn(total, h * d + g * kd + g * d).to(dtype)
            q, k, v = both.split([h * d, g * kd, g * d], -1)
            packed = [q.unflatten(-1, (h, d)), k.unflatten(-1, (g, kd)), v.unflatten(-1, (g, d))]
            cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
            leaves = [x.detach().requires_grad_() for x in packed]
            out = quest_core.attention_packed(*leaves, made.module.layers[-1], cu_seqlens=cu, is_causal=is_causal)
            found = _gradients(out, leaves)
            if subject.name == "aft-conv 2d":
                _loop(made, packed, lengths, [out.detach(), *found])
            else:
                _padded(made, packed, lengths, [out.detach(), *found])


def _gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, _ramp(out), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _ramp(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), dtype=torch.float64)).reshape(x.shape).to(x.dtype)


def _padded(made: Made, packed: Sequence[Tensor], lengths: Sequence[int], got: Sequence[Tensor]) -> None:
    longest = max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]  # [B, L]
    index = torch.where(real, real.flatten().cumsum(0).reshape(real.shape) - 1, 0)
    mask = real[:, None, None] if made.cell.subject.key_masks else real[:, None, None] & real[:, None, :, None]

    def results(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in packed]
        q, k, v = (x[index].transpose(1, 2) for x in leaves)  # [B, heads, L, D]
        learned = {name: p.detach().to(dtype) for name, p in made.named().items()}
        out = made.reference(learned, q, k, v, mask).transpose(1, 2)[real]
        return [out.detach(), *_gradients(out, leaves)]

    _settle(made, results, packed, longest, got)


def _loop(made: Made, packed: Sequence[Tensor], lengths: Sequence[int], got: Sequence[Tensor]) -> None:
    def results(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in packed]
        learned = {name: p.detach().to(dtype) for name, p in made.named().items()}
        each = zip(*(x.split(list(lengths)) for x in leaves), strict=True)
        outs = [made.reference(learned, *(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1) for one in each]
        out = torch.cat(outs)
        return [out.detach(), *_gradients(out, leaves)]

    _settle(made, results, packed, max(lengths), got)


def _settle(
    made: Made,
    results: Callable[[torch.dtype], list[Tensor]],
    packed: Sequence[Tensor],
    longest: int,
    got: Sequence[Tensor],
) -> None:
    dtype = made.cell.dtype
    exact, plain = results(torch.float64), results(torch.float32 if dtype == torch.float64 else dtype)
    shaped = (packed[0], torch.empty(1, 1, longest, 1))
    compare(got, exact, bounds(made, exact, plain, shaped), dtype, ["output", *(f"gradient of {n}" for n in "qkv")])
