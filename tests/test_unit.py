"""Unit vectors against the reference: every layout, type and derivative, and norms at the ends of a type's range."""

import pytest
import torch
from allocations import allocated
from torch.overrides import TorchFunctionMode

from quest_core import ops
from quest_core.mechanisms import naive as reference
from quest_core.ops import unit


@pytest.fixture(autouse=True, params=[0, ops.SMALL], ids=["one pass", "operations"])
def derivative(request, monkeypatch):
    """Take the derivative of tensors of a few entries in both ways."""
    monkeypatch.setattr(ops, "SMALL", request.param)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def layouts(dtype):
    """Tensors of shape [..., D] as models make them."""

    def random(*shape):
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
def test_every_layout_and_type(layout, dtype):
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


def test_derivatives_of_every_kind():
    x = torch.randn(3, 2, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    options = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(unit, x, **options)
    assert torch.autograd.gradgradcheck(unit, x, check_batched_grad=True)

    def energy(f):
        return torch.func.hessian(lambda x: f(x).pow(3).sum())(x.detach())

    torch.testing.assert_close(energy(unit), energy(lambda x: x / x.norm(dim=-1, keepdim=True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_vector_stays_zero_with_zero_derivatives(dtype):
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


@pytest.mark.parametrize("exponent", [-18, -10, 10, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_neither_overflow_nor_underflow(dtype, exponent):
    x = (torch.randn(4, 16, dtype=torch.float64) * 10.0**exponent).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, truth = unit(x), reference.unit(wide)
    grad = torch.randn_like(truth) * 10.0 ** min(exponent, 0)
    (slope,) = torch.autograd.grad(out, x, grad.to(dtype))
    (true_slope,) = torch.autograd.grad(truth, wide, grad.to(dtype).double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), truth, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(slope.double(), true_slope, rtol=4 * eps, atol=16 * eps * float(true_slope.abs().max()))


@pytest.mark.parametrize("norm", [1e-30, 1e30])
def test_norms_outside_the_range_are_zero_with_zero_derivatives(norm):
    x = torch.full((3, 8), norm).requires_grad_()
    plain = torch.func.grad(lambda x: unit(x).sum())(x.detach())
    out = unit(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert not torch.cat([out, slope, plain]).any()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.1), (torch.bfloat16, 3.2), (torch.float16, 3.2)])
def test_memory_is_the_result_and_one_product(dtype, factor):
    """Bytes allocated, per byte of x: the result and, for half types, one float32 tensor of this size."""
    x = torch.randn(2, 8, 256, 64).to(dtype)
    assert allocated(lambda: unit(x)) <= factor * x.nbytes


def test_results_lie_in_the_order_of_a_projection():
    """A step with two layouts takes up to four times as long, and so does the projection's backward pass."""
    heads = torch.randn(2, 5, 3, 16).transpose(1, 2)  # [B, H, N, D]
    packed = torch.randn(2, 5, 3, 3, 16)[:, :, 1].transpose(1, 2)
    for x, stride in ((heads, heads.stride()), (packed, heads.stride()), (copy := heads.contiguous(), copy.stride())):
        leaf = x.detach().requires_grad_()
        grads = (torch.randn(2, 3, 5, 16), torch.randn(2, 5, 3, 16).transpose(1, 2))  # as SDPA's kernels return them
        for out in (unit(x), unit(leaf)):
            assert out.stride() == stride
        for grad in grads:
            assert torch.autograd.grad(out, leaf, grad, retain_graph=True)[0].stride() == stride


def test_a_float32_vector_takes_three_calls_of_pytorch():
    names = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Calls():
        unit(torch.ones(2, 3))
    assert [x for x in names if x not in ("__get__", "dim", "is_contiguous", "ones")] == [
        "linalg_vector_norm",
        "threshold",
        "div",
    ]
