"""Triton kernels against float64: compiled on a GPU; on the CPU under Triton's interpreter, at sizes it can bear."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quest_core
from quest_core.kernels import short_applies, short_attention, unit
from quest_core.kernels.aft import aft_applies, aft_simple
from quest_core.kernels.unit import _path
from quest_core.mechanisms import reference, reference_aft

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def fused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEST_KERNELS", "fused")
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def check(got: Tensor, plain: Tensor, truth: Tensor, device: str, factor: int = 2) -> None:
    """At most `factor` times the error of the plain computation in the same type, or a few units in the last place."""
    error, yardstick = (got.double() - truth).norm(), (plain.double() - truth).norm()
    # The interpreter cuts bfloat16 off where hardware rounds.
    factor = 4 if device == "cpu" and got.dtype == torch.bfloat16 else factor
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
    assert _path(x, "fused") == "triton"
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


AFT = [
    "aft-simple",
    "aft-full(max_length=700, rank=128)",
    "aft-full(max_length=700, rank=null)",
    "aft-local(max_length=700, rank=9, window=40)",
]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", AFT)
def test_aft(attention: str, dtype: torch.dtype, is_causal: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, those of the biases too; at most four times the eager path's error, for exp is coarser."""
    batch, tokens, heads, dim = (3, 700, 4, 33) if device == "cuda" else (1, 20, 1, 3)
    made = quest_core.mechanism(attention, num_heads=heads, head_dim=dim).to(device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(30)  # biases that weigh something
    inputs = [random(batch, tokens, heads, dim, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)]
    assert aft_applies(*inputs[1:], 128)
    grad = random(batch, heads, tokens, dim, dtype=torch.float64, device=device)
    found = []
    for kernels, wide in (("fused", False), ("eager", False), ("eager", True)):
        monkeypatch.setenv("QUEST_KERNELS", kernels)
        module = copy.deepcopy(made).double() if wide else copy.deepcopy(made)
        leaves = [(x.double() if wide else x.clone()).requires_grad_() for x in inputs]
        out = module(*leaves, is_causal=is_causal)
        found.append([out, *torch.autograd.grad(out, [*leaves, *module.parameters()], grad.to(out.dtype))])
    for triple in zip(*found, strict=True):
        check(*triple, device, factor=4)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["quest", "aft-simple", "aft-full(max_length=17, rank=3)"])
def test_more_samples_than_a_short_axis_of_a_grid(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third axis of a grid end at 65535."""
    made = quest_core.mechanism(attention, num_heads=2, head_dim=16).to("cuda")
    inputs = [torch.randn(70_000, 2, 17, 16, device="cuda", requires_grad=True) for _ in range(3)]
    found = []
    for kernels in ("fused", "eager"):
        monkeypatch.setenv("QUEST_KERNELS", kernels)
        out = made(*inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 48:
        pytest.skip(f"tensors of 2^31 elements take 48 GiB here, and the GPU has {free:.0f} GiB free")
    rows, dim = 2**25 + 5, 64
    x = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = unit(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones((), device="cuda", dtype=x.dtype).expand(rows, dim))
    ends = torch.tensor([0, 1, rows - 2, rows - 1], device="cuda")
    few = x.detach()[ends].double().requires_grad_()
    truth = reference.unit(few)
    torch.testing.assert_close(out[ends].double(), truth, rtol=0, atol=2**-8)
    (wanted,) = torch.autograd.grad(truth.sum(), few)
    torch.testing.assert_close(slope[ends].double(), wanted, rtol=0, atol=2**-8)
    del out, slope

    k = torch.full((1, rows, dim), -torch.inf, device="cuda", dtype=torch.bfloat16)
    k[:, -4:] = torch.randn(1, 4, dim, device="cuda")  # nothing else is visible
    y = aft_simple(k, x.detach()[None], True)
    seen = torch.ones(1, 4, 4, dtype=torch.bool, device="cuda").tril()
    wanted = reference_aft.weighted_average(k[:, -4:], x.detach()[None, -4:], None, seen)
    torch.testing.assert_close(y[:, -4:].double(), wanted, rtol=1e-4, atol=1e-4)
    assert not y[:, :-4].any()
