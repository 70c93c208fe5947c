"""Unit vectors against the reference: every layout, type and derivative, and norms at the ends of a type's range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from quest_core.ops import unit
from quest_core.testing import references as reference

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of shape [..., D] as models make them."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    return {
        "contiguous": random(2, 3, 5, 16),
        "tokens before heads": random(2, 5, 3, 16).transpose(1, 2),
        "slice of packed qkv": random(2, 5, 3, 3, 16)[:, :, 1].transpose(1, 2),
        "slice of features": random(2, 3, 5, 33)[..., 1:17],
        "every other feature": random(2, 3, 5, 32)[..., ::2],
        "expanded": random(2, 1, 5, 16).expand(2, 3, 5, 16),
        "features not last in memory": random(2, 3, 16, 5).mT,
        "four axes that do not merge": random(7, 6, 5, 4, 9).permute(3, 0, 2, 1, 4)[:, ::2, ::2, ::2],
        "one vector": random(7),
        "one feature": random(4, 1),
        "no rows": random(0, 3),
        "no features": random(2, 0),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_every_layout_and_type(layout: str, dtype: torch.dtype) -> None:
    x = layouts(dtype)[layout].detach().requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, truth = unit(x), reference.unit(wide)
    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    (slope,) = torch.autograd.grad(out, x, grad)
    (true_slope,) = torch.autograd.grad(truth, wide, grad.double())
    eps = torch.finfo(dtype).eps
    assert out.dtype == slope.dtype == dtype
    assert out.shape == slope.shape == x.shape
    torch.testing.assert_close(out.double(), truth, rtol=2 * eps, atol=2 * eps)
    # The slope is a difference of terms of the size of grad / ‖x‖.
    size = float((grad.double() / wide.detach().norm(dim=-1, keepdim=True)).abs().max()) if x.numel() else 0.0
    torch.testing.assert_close(slope.double(), true_slope, rtol=4 * eps, atol=8 * eps * size)
    with torch.no_grad():
        torch.testing.assert_close(unit(x), out, rtol=0, atol=0)


def test_derivatives_of_every_kind() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    options = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(unit, x, **options)
    assert torch.autograd.gradgradcheck(unit, x, check_batched_grad=True)

    def energy(f: object) -> object:
        return torch.func.hessian(lambda x: f(x).pow(3).sum())(x.detach())  # type: ignore[operator]

    torch.testing.assert_close(energy(unit), energy(lambda x: x / x.norm(dim=-1, keepdim=True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_vector_stays_zero_with_zero_derivatives(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 8).to(dtype)
    x[1, 2] = 0
    x.requires_grad_()
    out = unit(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    other = torch.func.grad(lambda x: unit(x).sum())(x.detach())
    for value in (out, slope, second, other):
        assert value.isfinite().all()
        assert not value[1, 2].any()


@pytest.mark.parametrize("exponent", [-37, -30, -22, 18, 22, 30, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_neither_overflow_nor_underflow(dtype: torch.dtype, exponent: int) -> None:
    x = (torch.randn(4, 16, dtype=torch.float64) * 10.0**exponent).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, truth = unit(x), reference.unit(wide)
    grad = torch.randn_like(truth) * 10.0 ** min(exponent, 0)
    (slope,) = torch.autograd.grad(out, x, grad.to(dtype))
    (true_slope,) = torch.autograd.grad(truth, wide, grad.to(dtype).double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), truth, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(slope.double(), true_slope, rtol=4 * eps, atol=16 * eps * float(true_slope.abs().max()))


# --- the two ways to sum the squares --------------------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor that might have no numbers to read."""


def sums(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types in which `call` sums squares, in order."""
    found: list[torch.dtype] = []
    norm = torch.linalg.vector_norm

    def watched(*given: object, dtype: torch.dtype, **options: object) -> Tensor:
        found.append(dtype)
        return norm(*given, dtype=dtype, **options)  # type: ignore[no-any-return,call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", watched)
        call()
    return found


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_are_summed_in_float32_where_all_norms_allow_it(
    dtype: torch.dtype, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = [torch.float32], [torch.float32, torch.float64]
    for length, wanted in {1e-8: fast, 1: fast, 1e8: fast, 1e-12: slow, 1e12: slow, 0: slow, torch.nan: slow}.items():
        x = torch.nn.functional.one_hot(torch.arange(6), 8).to(dtype)
        x[4] *= length
        x.requires_grad_(recorded)
        assert sums(lambda x=x: unit(x), monkeypatch) == wanted, length
    assert sums(lambda: unit(torch.ones(0, 4)), monkeypatch) == [torch.float64]
    assert sums(lambda: unit(torch.zeros(4, dtype=torch.float16)), monkeypatch) == [torch.float32]


def test_squares_are_summed_in_float64_where_numbers_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)

    def fake() -> None:
        with FakeTensorMode() as mode:
            unit(mode.from_tensor(x))

    def counted() -> None:
        with FlopCounterMode(display=False):
            unit(x)

    ways: dict[str, Callable[[], object]] = {
        "subclass": lambda: unit(x.as_subclass(Subclass)),
        "meta": lambda: unit(x.to("meta")),
        "FakeTensorMode": fake,
        "TorchDispatchMode": counted,
        "make_fx": lambda: make_fx(unit)(x),
        "vmap": lambda: torch.func.vmap(unit)(x),
        "jvp": lambda: torch.func.jvp(unit, (x,), (x,)),
        "grad": lambda: torch.func.grad(lambda x: unit(x).sum())(x),
        "jit.trace": lambda: torch.jit.trace(unit, x, check_trace=False),
    }
    for name, call in ways.items():
        assert sums(call, monkeypatch) == [torch.float64], name
    leaf = x.clone().requires_grad_()
    again = sums(lambda: checkpoint(unit, leaf, use_reentrant=False).sum().backward(), monkeypatch)
    assert again == [torch.float32, torch.float32]


@pytest.mark.parametrize("layout", [name for name in layouts(torch.float32) if not name.startswith("no ")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_ways_agree(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = layouts(dtype)[layout].detach().requires_grad_()
    eps = torch.finfo(dtype).eps

    def both() -> tuple[Tensor, Tensor]:
        out = unit(x)
        return out, torch.autograd.grad(out, x, torch.ones_like(out))[0]

    fast = both()
    monkeypatch.setattr(torch, "aminmax", lambda norm: torch.zeros(2))
    for mine, other in zip(fast, both(), strict=True):
        torch.testing.assert_close(mine, other, rtol=4 * eps, atol=4 * eps * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    rows = torch.randn(8, 16, dtype=torch.float64)
    for i, length in enumerate([1e-25, 1e25, 1e-30, 1e30, 0, torch.nan, torch.inf]):
        rows[i] *= length
    x = rows.to(dtype).requires_grad_()
    eps = torch.finfo(dtype).eps
    out = unit(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
    for i, row in enumerate(x.detach()):
        one = row.clone().requires_grad_()
        (own,) = torch.autograd.grad(unit(one), one, torch.ones_like(one))
        torch.testing.assert_close(out[i], unit(row), rtol=2 * eps, atol=0, equal_nan=True)
        size = float(own.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(slope[i], own, rtol=8 * eps, atol=16 * eps * size, equal_nan=True)
        if row.isfinite().all():
            torch.testing.assert_close(out[i].double(), reference.unit(row.double()), rtol=2 * eps, atol=2 * eps)


def test_results_are_contiguous_or_in_the_order_of_a_projection() -> None:
    """A step with two layouts takes up to four times as long, and so does the projection's backward pass."""
    heads = torch.randn(2, 5, 3, 16).transpose(1, 2)  # [B, H, N, D]
    packed = torch.randn(2, 5, 3, 3, 16)[:, :, 1].transpose(1, 2)
    for x, stride in ((heads, heads.stride()), (packed, torch.empty(packed.shape).stride())):
        leaf = x.detach().requires_grad_()
        grads = (torch.randn(2, 3, 5, 16), torch.randn(2, 5, 3, 16).transpose(1, 2))  # as SDPA's kernels return them
        for out in (unit(x), unit(leaf)):
            assert out.stride() == stride
        for grad in grads:
            assert torch.autograd.grad(out, leaf, grad, retain_graph=True)[0].stride() == stride


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_no_vector_depends_on_whether_another_is_moderate(norm: float) -> None:
    moderate = torch.randn(5, 7, 16)
    alone, joined = (moderate.clone().requires_grad_() for _ in range(2))
    extreme = torch.full((1, 7, 16), norm)
    outs = unit(alone), unit(torch.cat([joined, extreme]))[:5]
    assert torch.equal(*outs)
    for out in outs:
        out.square().mul(torch.arange(16)).sum().backward()
    assert torch.equal(alone.grad, joined.grad)
