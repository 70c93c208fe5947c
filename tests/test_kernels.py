"""The fast paths against their references; Triton kernels run under Triton's interpreter, for CI has no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quest_core.kernels import mode, short_applies, short_attention, unit
from quest_core.kernels.aft import aft_applies
from quest_core.kernels.layout import empty_rows, memory_order, merge_axes
from quest_core.kernels.unit import _path
from quest_core.mechanisms import reference

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; it is part of the extra 'test' on Linux",
)
if importlib.util.find_spec("triton") is not None:
    # Triton decides whether to interpret when it is first imported: here, before any test runs.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from quest_core.kernels import short_triton, unit_triton

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton kernels, interpreted, for CPU tensors."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("QUEST_KERNELS", "fused")
    yield
    torch.compiler.reset()


def allowed(dtype: torch.dtype) -> float:
    """How many times the error of the plain computation is allowed: 2, as everywhere.

    The interpreter cuts bfloat16 off where hardware rounds to nearest, and so doubles each rounding error.
    """
    return 4.0 if dtype == torch.bfloat16 else 2.0


def check_error(got: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype, size: Tensor | None = None) -> None:
    """The norm of got − truth, at most `allowed` times that of plain − truth, or a few units in the last place.

    Args:
        size: a tensor of the size of what rounding acts on, where that is larger than `truth`.
    """
    error, yardstick = (got.double() - truth).norm(), (plain.double() - truth).norm()
    floor = 4 * torch.finfo(dtype).eps * (truth if size is None else size).norm()
    assert got.dtype == dtype
    assert error <= max(allowed(dtype) * yardstick, floor), f"{error:.3g} where plain has {yardstick:.3g}"


# --- unit vectors -----------------------------------------------------------------------------------------------------


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of shape [..., D] as models make them."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    return {
        "contiguous": random(2, 3, 5, 16),
        "tokens before heads": random(2, 5, 3, 16).transpose(1, 2),
        "slice of packed qkv": random(2, 5, 3, 3, 16)[:, :, 1].transpose(1, 2),
        "expanded": random(2, 1, 5, 16).expand(2, 3, 5, 16),
        "features not last in memory": random(2, 3, 16, 5).mT,
        "four axes that do not merge": random(7, 6, 5, 4, 9).permute(3, 0, 2, 1, 4)[:, ::2, ::2, ::2],
        "one vector": random(7),
        "odd features, many rows": random(2, 150, 33),
        "many features": random(3, 1000),
        "one feature": random(4, 1),
    }


def plain_unit(x: Tensor) -> Tensor:
    """The formula in the dtype of x, accumulating as PyTorch's norm does."""
    return x / x.norm(dim=-1, keepdim=True)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_triton_unit_forward_and_backward(layout: str, dtype: torch.dtype) -> None:
    x = layouts(dtype)[layout].detach().requires_grad_()
    assert unit_triton.applies(x)
    out = unit(x)
    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    (slope,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    truth = reference.unit(wide)
    (true_slope,) = torch.autograd.grad(truth, wide, grad.double())
    same = x.detach().clone().requires_grad_()
    plain = plain_unit(same)
    (plain_slope,) = torch.autograd.grad(plain, same, grad)
    check_error(out, plain, truth, dtype)
    # The slope is a difference of terms of the size of grad / ‖x‖, exactly 0 where there is one feature.
    check_error(slope, plain_slope, true_slope, dtype, size=grad.double() / wide.detach().norm(dim=-1, keepdim=True))


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_triton_unit_reads_gradients_of_any_layout() -> None:
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64).transpose(1, 2).requires_grad_()
    for grad in (torch.randn(2, 3, 5, 16, dtype=x.dtype), torch.ones((), dtype=x.dtype).expand(2, 3, 5, 16)):
        (slope,) = torch.autograd.grad(unit(x), x, grad)
        (truth,) = torch.autograd.grad(reference.unit(x), x, grad)
        torch.testing.assert_close(slope, truth)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_triton_unit_gradcheck() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(unit, x, fast_mode=True)


@pytest.mark.parametrize("path", ["auto", "eager", pytest.param("fused", marks=needs_triton)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_vector_stays_zero_with_zero_gradient(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    monkeypatch.setenv("QUEST_KERNELS", path)
    x = torch.randn(3, 4, 8).to(dtype)
    x[1, 2] = 0
    x.requires_grad_()
    out = unit(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert not out[1, 2].any()
    assert not slope[1, 2].any()
    assert out.isfinite().all()
    assert slope.isfinite().all()


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_triton_unit_keeps_the_order_of_axes_in_memory() -> None:
    layout = layouts(torch.float32)
    assert unit(layout["tokens before heads"]).stride() == layout["tokens before heads"].stride()
    assert unit(layout["slice of packed qkv"]).stride() == layout["tokens before heads"].stride()


def test_axes_merge_only_where_every_tensor_allows() -> None:
    assert merge_axes([2, 3, 5], [15, 5, 1]) == ([30], [[1]])
    assert merge_axes([2, 3, 5], [15, 5, 1], [100, 5, 1]) == ([2, 15], [[15, 1], [100, 1]])
    assert merge_axes([2, 1, 5], [5, 77, 1]) == ([10], [[1]])
    assert merge_axes([1, 1]) == ([], [])
    x = torch.empty(2, 5, 3, 4).transpose(1, 2)
    assert memory_order(x.stride()) == ((0, 2, 1, 3), (0, 2, 1, 3))
    assert empty_rows(x, 6).shape == (2, 3, 5, 6)
    assert empty_rows(x, 6).stride() == (90, 6, 18, 1)


# --- short attention --------------------------------------------------------------------------------------------------


def problem(
    batch: int, heads: int, groups: int, n: int, m: int, dim: int, v_dim: int, dtype: torch.dtype, loud: float = 1.0
) -> list[Tensor]:
    """q, k, v as projections leave them; queries are `loud` times normal."""
    shapes = ((n, heads, dim), (m, groups, dim), (m, groups, v_dim))
    made = [torch.randn(batch, *shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    made[0] = made[0] * loud
    return [x.to(dtype).requires_grad_() for x in made]


def same_dtype(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, is_causal: bool) -> Tensor:
    """What the kernel replaces, by the plain formula: unit keys, softmax, weights times values."""
    share = q.shape[1] // k.shape[1]
    keys, values = plain_unit(k).repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    seen = reference.visible(q.shape[2], k.shape[2], mask, is_causal)
    blind = (~seen).all(-1, keepdim=True)
    weights = (q @ keys.mT * scale).masked_fill(~seen, -torch.inf).masked_fill(blind, 0).softmax(-1)
    return weights.masked_fill(blind, 0) @ values


# batch, H, G, N, M, D, Dv
SHAPES = {
    "one block": (2, 2, 2, 5, 5, 8, 8),
    "several blocks, grouped, odd features": (1, 4, 2, 70, 100, 20, 24),
    "more queries than keys": (2, 2, 1, 33, 17, 16, 16),
    "one key": (1, 2, 2, 3, 1, 16, 16),
}


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "key mask"])
@pytest.mark.parametrize("shape", SHAPES)
def test_short_attention(shape: str, masked: bool, is_causal: bool, dtype: torch.dtype) -> None:
    sizes = SHAPES[shape]
    q, k, v = inputs = problem(*sizes, dtype)
    mask = None
    if masked:
        mask = torch.rand(sizes[0], 1, 1, sizes[4]) > 0.3
        mask[-1, ..., : sizes[4] // 2] = False  # with a causal mask the first rows see nothing
    assert short_applies(q, k, v, mask=mask, dropout_p=0.0)
    options = {"scale": 1.5, "mask": mask, "is_causal": is_causal}
    out = short_attention(q, k, v, **options)  # type: ignore[arg-type]
    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    slopes = torch.autograd.grad(out, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    truth, _ = reference.attention(*wide, "quest", **options)  # type: ignore[arg-type]
    true_slopes = torch.autograd.grad(truth, wide, grad.double())
    same = [x.detach().clone().requires_grad_() for x in inputs]
    plain = same_dtype(*same, **options)  # type: ignore[arg-type]
    plain_slopes = torch.autograd.grad(plain, same, grad)
    check_error(out, plain, truth, dtype)
    for got, yardstick, true in zip(slopes, plain_slopes, true_slopes, strict=True):
        # With one key the gradients of q and k are 0: what remains is rounding of the size of the incoming gradient.
        if true.norm() < 1e-9:
            assert got.norm() <= 8 * torch.finfo(dtype).eps * grad.double().norm()
        else:
            check_error(got, yardstick, true, dtype)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loud", [6.0, 12.0, 1e4], ids=str)
def test_short_attention_where_the_bound_is_far_above_every_logit(loud: float, dtype: torch.dtype) -> None:
    """‖q‖ around 25, 50 and 4e4, and the keys of one row all point away from its query: exp(l − ‖q‖) would be 0 / 0."""
    inputs = problem(1, 1, 1, 20, 12, 16, 16, torch.float64, loud)
    q, k, v = (x.detach() for x in inputs)
    k = -q[:, :, :1] / q[:, :, :1].norm() * torch.rand(12, 1, dtype=q.dtype) + 1e-3 * k  # all against query 0
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = short_attention(q, k, v)
    wide = [x.detach().double() for x in (q, k, v)]
    truth, _ = reference.attention(*wide, "quest")
    same = same_dtype(*(x.detach() for x in (q, k, v)), scale=1.0, mask=None, is_causal=False)
    check_error(out, same, truth, dtype)
    for slope in torch.autograd.grad(out.sum(), (q, k, v)):
        assert slope.isfinite().all()


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_short_attention_of_extreme_keys_and_blind_rows() -> None:
    """Zero keys, norms of 1e4 and 1e-4 in half precision, and a sample that sees nothing."""
    q, k, v = (x.detach() for x in problem(2, 2, 2, 6, 7, 16, 16, torch.float16))
    k = k.clone()
    k[:, :, 0], k[:, :, 1], k[:, :, 2] = 0, k[:, :, 1] * 2500, k[:, :, 2] * 1e-4
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1] = False
    out = short_attention(q, k, v, mask=mask)
    truth, _ = reference.attention(*(x.detach() for x in (q, k, v)), "quest", mask=mask)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=3e-3)
    assert not out[1].any()
    slopes = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(slope[1].abs().sum() == 0 for slope in slopes)
    assert not slopes[1][:, :, 0].any()
    assert slopes[0].isfinite().all()


@needs_triton
@pytest.mark.parametrize("path", ["auto", "fused", "eager"])
def test_which_triton_kernels_cuda_takes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of itself the one for unit keys alone. These tensors say that they are on CUDA, and have no numbers."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("QUEST_KERNELS", path)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 5, 8, device="cuda") for _ in range(3))
        assert q.is_cuda
        taken = [short_applies(q, k, v, mask=None, dropout_p=0.0), aft_applies(k, v), _path(k, path) == "triton"]
    assert taken == [path == "fused", path == "fused", path != "eager"]


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_short_attention_says_what_it_takes() -> None:
    q, k, v = problem(1, 2, 2, 5, 5, 8, 8, torch.float32)
    assert short_applies(q, k, v, mask=None, dropout_p=0.0)
    assert not short_applies(q, k, v, mask=None, dropout_p=0.1)
    assert not short_applies(q, k, v, mask=torch.zeros(1, 1, 1, 5), dropout_p=0.0)
    assert not short_applies(q, k, v, mask=torch.ones(5, 5, dtype=torch.bool), dropout_p=0.0)
    assert not short_applies(q.double(), k.double(), v.double(), mask=None, dropout_p=0.0)
    assert not short_applies(*problem(1, 1, 1, 513, 5, 8, 8, torch.float32), mask=None, dropout_p=0.0)
    assert not short_applies(*problem(1, 1, 1, 5, 5, 136, 8, torch.float32), mask=None, dropout_p=0.0)
    assert not short_applies(q[:, :, :0], k, v, mask=None, dropout_p=0.0)


# --- compilers --------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unit": lambda q, k, v: unit(k * 2) + 1,
    "short attention": lambda q, k, v: short_attention(q * 2, k, v, is_causal=True) + 1,
}


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_without_a_graph_break(name: str) -> None:
    operation = OPERATIONS[name]
    inputs = problem(2, 4, 2, 5, 6, 16, 16, torch.float32)
    eager, compiled = operation(*inputs), torch.compile(operation, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager)
    assert compiled.stride() == eager.stride()
    for a, b in zip(
        torch.autograd.grad(compiled.square().sum(), inputs, materialize_grads=True, allow_unused=True),
        torch.autograd.grad(eager.square().sum(), inputs, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", OPERATIONS)
def test_exports_as_one_operator(name: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return OPERATIONS[name](q, k, v)

    inputs = tuple(x.detach() for x in problem(2, 4, 2, 5, 6, 16, 16, torch.float32))
    exported = torch.export.export(Model(), inputs)
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert f"quest_core.{name.replace(' ', '_')}.default" in called
    torch.testing.assert_close(exported.module()(*inputs), Model()(*inputs))


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_operators_keep_pytorchs_rules() -> None:
    q, k, v = problem(1, 2, 2, 5, 6, 16, 16, torch.float32)
    torch.library.opcheck(unit_triton.unit, (k,))
    torch.library.opcheck(short_triton.short_attention, (q, k, v, torch.rand(1, 6) > 0.3, True, 1.0))


BUILD = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quest_core.kernels import aft_triton, short_triton, unit_triton

def build(kernel, constants, pointer):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name == "mask_ptr":
            return "*u8"
        if name in ("shift_ptr", "total_ptr", "delta_ptr") or (kernel in sums and name in kept):
            return "*fp32"
        return pointer if name.endswith("ptr") else "fp32" if name in ("scale", "limit", "natural") else "i32"

    names = kernel.arg_names
    source = ASTSource(
        kernel, {n: kind(n) for n in names}, {(names.index(n),): value for n, value in constants.items()}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.metadata.shared <= 227 * 1024, made.metadata.shared

kept = ("in_ptr", "out_ptr", "carry_ptr", "before_ptr", "after_ptr", "y_ptr", "lse_ptr")  # float32 whatever comes in
flags = {"BLOCK": aft_triton.BLOCK}
sums = {
    aft_triton._totals_kernel: {"BACKWARD": True},
    aft_triton._carry_kernel: {"BACKWARD": True},
    aft_triton._running_kernel: {},
    aft_triton._running_gradient_kernel: {"CAUSAL": True},
}
biased = {"TABLE": False, "CAUSAL": True, "LOCAL": True, "RANK": 256}  # the largest tiles there are
sums |= {kernel: biased for kernel in (aft_triton._biased_kernel, aft_triton._biased_key_kernel)}
biased |= {"SPLITS": aft_triton.SPLITS}
sums |= {kernel: biased for kernel in (aft_triton._biased_left_kernel, aft_triton._biased_right_kernel)}
for kernel, constants in sums.items():
    build(kernel, {name: value for name, value in (constants | flags).items() if name in kernel.arg_names}, "*bf16")

for wide, pointer in ((tl.float32, "*bf16"), (tl.float64, "*fp64")):
    for kernel in (unit_triton._forward_kernel, unit_triton._backward_kernel):
        build(kernel, {"WIDE": wide, "ROWS": 32, "DIM": 64}, pointer)
for kernel in (short_triton._forward_kernel, short_triton._query_kernel, short_triton._key_kernel):
    flags = {"MASKED": True, "CAUSAL": True, "DOT": tl.float32, "BN": 32, "BM": 32, "BD": 128, "BV": 128}
    build(kernel, flags, "*fp32")
    flags |= {"DOT": tl.bfloat16, "BN": 64, "BM": 64, "BD": 16, "BV": 16}
    build(kernel, flags, "*bf16")
"""


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for NVIDIA GPUs comes for Linux alone")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """The interpreter forgives what the compiler does not; compiling needs no GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["auto", "eager", "reference"])
def test_every_mode_equals_the_reference(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEST_KERNELS", path)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64).transpose(1, 2).requires_grad_()
    out, truth = unit(x), reference.unit(x)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad), torch.autograd.grad(truth, x, grad))


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEST_KERNELS", "fusd")
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        mode()


def test_triton_is_not_imported_where_it_is_not_used() -> None:
    program = (
        "import sys, torch, quest_core; "
        "quest_core.attention(*(torch.randn(1, 2, 3, 4) for _ in range(3))); "
        "assert 'triton' not in sys.modules"
    )
    environment = {**os.environ, "QUEST_KERNELS": "auto"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scaled_dot_product_attention_equals_short_attentions_yardstick() -> None:
    """The formula that short attention is compared with is the one that it replaces."""
    q, k, v = problem(1, 4, 2, 9, 7, 8, 8, torch.float64)
    got = same_dtype(q, k, v, scale=1.0, mask=None, is_causal=False)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, unit(k), v, scale=1.0, enable_gqa=True))
