"""Triton kernels against float64: compiled on a GPU; on the CPU under Triton's interpreter, at sizes it can bear."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quest_core.kernels import short_applies, short_attention, unit
from quest_core.mechanisms import reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def fused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEST_KERNELS", "fused")
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def check(got: Tensor, plain: Tensor, truth: Tensor, device: str) -> None:
    """At most twice the error of the plain computation in the same type, or a few units in the last place."""
    error, yardstick = (got.double() - truth).norm(), (plain.double() - truth).norm()
    # The interpreter cuts bfloat16 off where hardware rounds.
    factor = 4 if device == "cpu" and got.dtype == torch.bfloat16 else 2
    assert error <= max(factor * yardstick, 4 * torch.finfo(got.dtype).eps * truth.norm())
    assert got.isfinite().all()


def both_ways(
    fast: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    *inputs: Tensor,
    device: str,
) -> None:
    """Outputs and gradients of all inputs."""
    own, same, wide = (
        [change(x.detach()).requires_grad_() for x in inputs] for change in (Tensor.clone, Tensor.clone, Tensor.double)
    )
    outs = fast(*own), plain(*same), truth(*wide)
    check(*outs, device)
    grad = torch.randn_like(outs[2])
    slopes = [torch.autograd.grad(out, xs, grad.to(out.dtype)) for out, xs in zip(outs, (own, same, wide), strict=True)]
    for triple in zip(*slopes, strict=True):
        check(*triple, device)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "tokens before heads": lambda x: x.transpose(1, 2),
    "every other token": lambda x: x[:, :, ::2],
    "slice of packed qkv": lambda x: torch.stack([x, x, x], 2)[:, :, 1],
}


@pytest.mark.parametrize("dim", [16, 33, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_unit(layout: str, dim: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dim == 128:
        dim = 64
    tokens = 1024 if device == "cuda" else 6
    x = LAYOUTS[layout](random(2, 3, tokens, dim, dtype=dtype, device=device))
    both_ways(unit, lambda x: x / x.norm(dim=-1, keepdim=True), reference.unit, x, device=device)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Unit keys, softmax, weights times values, in the type of the inputs."""
    share = q.shape[1] // k.shape[1]
    keys, values = (k / k.norm(dim=-1, keepdim=True)).repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    seen = reference.visible(q.shape[2], k.shape[2], mask, is_causal).to(q.device)
    return (q @ keys.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "key mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 3, 197, 64), (1, 4, 2, 500, 128), (8, 4, 4, 25, 16)], ids=str)
def test_short_attention(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, masked: bool, is_causal: bool, device: str
) -> None:
    batch, heads, groups, n, dim = shape if device == "cuda" else (1, min(shape[1], 2), 1, min(shape[3], 20), 16)
    q, k, v = (random(batch, n, h, dim, dtype=dtype, device=device).transpose(1, 2) for h in (heads, groups, groups))
    mask = None
    if masked:
        mask = (torch.rand(batch, 1, 1, n) > 0.3).to(device)
        mask[..., 0] = True  # every query sees a key
    assert short_applies(q, k, v, mask=mask, dropout_p=0.0)
    both_ways(
        lambda q, k, v: short_attention(q, k, v, mask=mask, is_causal=is_causal),
        lambda q, k, v: formula(q, k, v, mask, is_causal),
        lambda q, k, v: formula(q, k, v, mask, is_causal),
        q,
        k,
        v,
        device=device,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_zero_keys(dtype: torch.dtype, device: str) -> None:
    q, k, v = (random(1, 2, 18, 16, dtype=dtype, device=device) for _ in range(3))
    k[:, :, 3] = 0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for out in (unit(k), short_attention(q, k, v)):
        assert out.isfinite().all()
        (slope,) = torch.autograd.grad(out.float().sum(), k)
        assert slope.isfinite().all()
        assert not slope[:, :, 3].any()
