"""Layers around a mechanism: Attention, MultiheadAttention with and without weights, and packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quest_core
from quest_core.testing.truth import truth

from .cases import BY_NAME, DTYPES, SUBJECTS, Cell, Made, Subject, bounds, compare

EMBED = 16
PLAIN = [s for s in SUBJECTS if not (s.training or "elliptical" in s.name or "dgqa" in s.spec.split("(")[0].split("+"))]
PLAIN = [s for s in PLAIN if s.name != "quest+pgqa"]  # its noise is tested without layers


def _disturbed(layer: nn.Module) -> None:
    """Parameters, biases too, that are not where they start."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _attend(
    mechanism: quest_core.Mechanism,
    rest: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    learned = {f"mechanism.{n.rpartition('mechanism.')[2]}": x for n, x in rest.items() if "mechanism" in n}
    options = {"attn_mask": mask, "is_causal": is_causal}
    out: Tensor = torch.func.functional_call(Plain(mechanism), learned, (q, k, v), options)
    return out


class Plain(nn.Module):
    """A mechanism by its references."""

    def __init__(self, mechanism: quest_core.Mechanism) -> None:
        super().__init__()
        self.mechanism = mechanism

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return truth(self.mechanism, q, k, v, **options)[0]


def _heads(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def _run(
    layer: nn.Module, reference: Callable[..., Tensor], x: Tensor, dtype: torch.dtype, call: Callable[..., Tensor]
) -> None:
    """Compare output and gradients of a layer with a function of (parameters, x)."""
    named = dict(layer.named_parameters())

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        learned = {name: p.detach().to(dtype).requires_grad_() for name, p in named.items()}
        out = function(learned, given)
        weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64) * 1.7).reshape(out.shape).to(out.dtype)
        sources = [given, *learned.values()]
        found = torch.autograd.grad(out, sources, weight, allow_unused=True)
        return [out.detach(), *(torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True))]

    got = results(
        lambda learned, given: torch.func.functional_call(_Caller(layer, call), _nested(learned), (given,)), dtype
    )
    exact = results(reference, torch.float64)
    made = Cell(BY_NAME["quest"], dtype=dtype).made()
    plain = results(reference, torch.float32 if dtype == torch.float64 else dtype)
    limits = bounds(made, exact, plain, (x, x[None]))
    compare(got, exact, limits, dtype, ["output", "gradient of x", *(f"gradient of {name}" for name in named)])


class _Caller(nn.Module):
    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _nested(learned: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"layer.{name}": x for name, x in learned.items()}


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("subject", PLAIN, ids=lambda s: s.name)
def test_attention(subject: Subject, heads: int) -> None:
    shift = PLAIN.index(subject)
    tokens = subject.lengths[0]
    for dtype in (DTYPES[0], DTYPES[1 + shift % 3]):
        for is_causal in (False, True) if subject.causal else (False,):
            torch.manual_seed(shift)
            config = subject.config(heads)
            layer = quest_core.Attention(EMBED, heads, config)
            _disturbed(layer)
            layer.to(dtype).eval()
            dim = EMBED // heads
            real = torch.rand(2, tokens) > 0.3
            real[:, 0] = True

            def reference(
                p: dict[str, Tensor], x: Tensor, config=config, layer=layer, dim=dim, real=real, is_causal=is_causal
            ) -> Tensor:
                q, k, v = (F.linear(x, p[f"{n}_proj.weight"], p[f"{n}_proj.bias"]) for n in "qkv")
                mask = real[:, None, None]
                if "sinkhorn" in str(config) or "pgqa" in str(config):
                    mask = mask & real[:, None, :, None]
                kd = subject.key_features or dim
                out = _attend(layer.mechanism, p, _heads(q, dim), _heads(k, kd), _heads(v, dim), mask, is_causal)
                return F.linear(out.transpose(1, 2).flatten(2), p["out_proj.weight"], p["out_proj.bias"])

            def call(module: nn.Module, x: Tensor, real=real, is_causal=is_causal) -> Tensor:
                return module(x, key_mask=real, is_causal=is_causal)

            x = torch.randn(2, tokens, EMBED + 3).to(dtype)[..., 2 : EMBED + 2]
            _run(layer, reference, x, dtype, call)


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize(
    ("subject", "need_weights"),
    [(s, weights) for s in PLAIN for weights in (True, False) if not (weights and s.key_masks)],  # families have none
    ids=lambda x: x.name if isinstance(x, Subject) else f"weights={x}",
)
def test_multihead_attention(subject: Subject, heads: int, need_weights: bool) -> None:
    shift = PLAIN.index(subject)
    tokens = 25 if subject.name != "aft-conv 2d" else 26
    for dtype in (DTYPES[0], DTYPES[1 + shift % 3]):
        torch.manual_seed(shift)
        config = subject.config(heads)
        layer = quest_core.MultiheadAttention(EMBED, heads, batch_first=True, attention=config)
        _disturbed(layer)
        layer.to(dtype).eval()
        dim = EMBED // heads

        def reference(p: dict[str, Tensor], x: Tensor, layer=layer, dim=dim) -> Tensor:
            kd, g = subject.key_features or dim, min(subject.groups, heads)
            q, k, v = F.linear(x, p["in_proj_weight"], p["in_proj_bias"]).split([EMBED, g * kd, g * dim], -1)
            out = _attend(layer.mechanism, p, _heads(q, dim), _heads(k, kd), _heads(v, dim), None, False)
            return F.linear(out.transpose(1, 2).flatten(2), p["out_proj.weight"], p["out_proj.bias"])

        def call(module: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = module(x, x, x, need_weights=need_weights)[0]
            return out

        _run(layer, reference, torch.randn(2, tokens, EMBED).to(dtype), dtype, call)


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
