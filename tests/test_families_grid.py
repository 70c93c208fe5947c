"""linear, cosine and the attention-free family under every transform, layout and type, against the references."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_aft
import test_linear
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import quest_core
from quest_core import ops as blocks
from quest_core.testing import versions

SPECS = ["linear", "cosine", "aft-simple", "aft-full(max_length=96)", "aft-local(max_length=96)", "aft-conv(dims=1)"]
CASES = [(spec, causal) for spec in SPECS for causal in (False, True) if not (causal and "conv" in spec)]
TYPES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
N = 70


def build(spec: str, heads: int = 2, dim: int = 4) -> quest_core.Mechanism:
    return test_aft.build(spec, heads, dim) if spec.startswith("aft") else test_linear.build(spec, heads, dim)


def truth(made: quest_core.Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    if str(made.config).startswith("aft"):
        return test_aft.truth(made, q, k, v, mask=mask, is_causal=is_causal, grid=(q.shape[2],))
    key_mask = None if mask is None else mask[:, 0, 0]
    return test_linear.truth(made, q, k, v, key_mask=key_mask, is_causal=is_causal)


def inputs(spec: str, n: int = N, batch: int = 2, heads: int = 2, dim: int = 4) -> tuple[Tensor, ...]:
    return test_aft.tensors(spec, batch, heads, n, n, dim)


class Call(torch.nn.Module):
    """A mechanism with only q, k and v as its arguments."""

    def __init__(self, spec: str, is_causal: bool) -> None:
        super().__init__()
        self.made, self.is_causal = build(spec), is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.made(q, k, v, is_causal=self.is_causal)

    def check(self, run: Callable[..., Tensor], x: tuple[Tensor, ...], tolerance: float = 1e-9) -> None:
        want = truth(self.made, *x, None, self.is_causal)
        torch.testing.assert_close(run(*x).double(), want.double(), rtol=tolerance, atol=tolerance)


def compiled(call: Call, spec: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = []
    run = torch.compile(
        call, fullgraph=True, dynamic=dynamic, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for n in (N, 5, 96) if dynamic else (N,):
        call.check(run, inputs(spec, n))
    assert len(graphs) == 1


def exported(call: Call, spec: str, dynamic: bool) -> None:
    n = torch.export.Dim("n", min=2, max=96)
    shapes = {name: {2: n} for name in "qkv"} if dynamic else None
    run = torch.export.export(call, inputs(spec), dynamic_shapes=shapes).module()
    for n in (N, 5, 96) if dynamic else (N,):
        call.check(run, inputs(spec, n))


def onnx(call: Call, spec: str, path: Path) -> None:
    versions.needs_torch("2.6", "torch.onnx.export(dynamo=True) of dynamic shapes")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    call = call.float()
    n = torch.export.Dim("n", min=2, max=96)
    shapes = {name: {2: n} for name in "qkv"}
    x = tuple(y.float() for y in inputs(spec))
    program = torch.onnx.export(call, x, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(path / "model.onnx")
    session = runtime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])

    def run(*x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, dict(zip("qkv", (y.numpy() for y in x), strict=True)))[0])

    for n in (N, 5, 96):
        call.check(run, tuple(y.float() for y in inputs(spec, n)), 1e-4)


def traced(call: Call, spec: str) -> None:
    run = torch.jit.trace(call, inputs(spec))
    call.check(run, tuple(2 * y for y in inputs(spec)))


def made_fx(call: Call, spec: str) -> None:
    for mode in ("real", "fake", "symbolic"):
        run = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs(spec))
        call.check(run, tuple(2 * y for y in inputs(spec)))


def vmapped(call: Call, spec: str) -> None:
    x = inputs(spec, 9)
    many = [torch.stack([y, 2 * y]) for y in x]
    got = torch.func.vmap(call)(*many)
    for i in range(2):
        call.check(lambda *_, i=i: got[i], tuple(y[i] for y in many))


def differentiated(call: Call, spec: str) -> None:
    x = inputs(spec, 9)
    leaves = [y.clone().requires_grad_() for y in x]
    want = torch.autograd.grad(truth(call.made, *leaves, None, call.is_causal).square().sum(), leaves)
    got = torch.func.grad(lambda *y: call(*y).square().sum(), argnums=(0, 1, 2))(*x)
    torch.testing.assert_close(got, want)
    rows = torch.func.jacrev(lambda q: call(q, *x[1:]).square().sum())(x[0])
    torch.testing.assert_close(rows, want[0])


def pushed(call: Call, spec: str, dual: bool) -> None:
    x = inputs(spec, 9)
    tangent = [y.flip(2) for y in x]
    _, want = torch.autograd.functional.jvp(lambda *y: truth(call.made, *y, None, call.is_causal), x, tuple(tangent))
    if dual:
        with forward_ad.dual_level():
            out = call(*(forward_ad.make_dual(y, t) for y, t in zip(x, tangent, strict=True)))
            got = forward_ad.unpack_dual(out).tangent
    else:
        _, got = torch.func.jvp(call, x, tuple(tangent))
    torch.testing.assert_close(got, want)


def twice(call: Call, spec: str) -> None:
    assert torch.autograd.gradgradcheck(call, [y.requires_grad_() for y in inputs(spec, 5, 1)])


CELLS: dict[str, tuple[Callable[..., None], str]] = {  # the transform and how a refusal names it
    "compile": (lambda call, spec, _: compiled(call, spec, False), ""),
    "compile dynamic": (lambda call, spec, _: compiled(call, spec, True), ""),
    "export": (lambda call, spec, _: exported(call, spec, False), ""),
    "export dynamic": (lambda call, spec, _: exported(call, spec, True), ""),
    "onnx": (onnx, "torch.onnx.export"),
    "trace": (lambda call, spec, _: traced(call, spec), "torch.jit.trace"),
    "make_fx": (lambda call, spec, _: made_fx(call, spec), ""),
    "vmap": (lambda call, spec, _: vmapped(call, spec), "torch.func"),
    "grad": (lambda call, spec, _: differentiated(call, spec), "torch.func"),
    "jvp": (lambda call, spec, _: pushed(call, spec, False), "torch.func"),
    "dual": (lambda call, spec, _: pushed(call, spec, True), "forward-mode differentiation"),
    "double backward": (lambda call, spec, _: twice(call, spec), "double backward"),
}


def is_operator(spec: str, is_causal: bool) -> bool:
    """Whether it is an opaque operator, which has no rules for transforms."""
    return "full" in spec or "local" in spec or (spec == "aft-simple" and is_causal)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_transform_is_right_or_refused_by_name(spec: str, is_causal: bool, cell: str, tmp_path: Path) -> None:
    run, named = CELLS[cell]
    call = Call(spec, is_causal)
    if not (named and is_operator(spec, is_causal)):
        run(call, spec, tmp_path)
        return
    if cell == "onnx":
        pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match="does not support") as caught:
        run(call, spec, tmp_path)
    error: Any = caught.value
    error = error if isinstance(error, quest_core.QuestError) else error.__cause__  # torch.onnx wraps it
    assert isinstance(error, quest_core.UnsupportedError)
    assert f"attention '{spec.split('(')[0]}" in str(error)
    assert named in str(error)
    assert "'linear'" in str(error)


def laid_out(x: tuple[Tensor, ...], layout: str) -> list[Tensor]:
    if layout == "transposed":
        return [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    if layout == "sliced":
        return [torch.nn.functional.pad(y, (1, 1, 2, 2))[:, :, 2:-2, 1:-1] for y in x]
    if layout == "packed":
        widths = [y.shape[-1] for y in x]
        return list(torch.cat(x, -1).split(widths, -1))
    if layout == "expanded":
        return [y[:1].expand_as(y) for y in x]
    return [y.contiguous() for y in x]


LAYOUTS = ["contiguous", "transposed", "sliced", "packed", "expanded", "one head", "one token"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
def test_every_layout_and_type_equals_the_reference(
    spec: str, is_causal: bool, dtype: torch.dtype, layout: str
) -> None:
    heads, n = 1 if layout == "one head" else 2, 1 if layout == "one token" else 17
    made = build(spec, heads).to(dtype)
    x = laid_out(tuple(y.to(dtype) for y in inputs(spec, n, heads=heads)), layout)
    bias = torch.randn(2, 1, 1, n, dtype=torch.float64).masked_fill(torch.rand(2, 1, 1, n) < 0.3, -math.inf)
    for mask in (None, bias > -math.inf, bias.to(dtype)):
        leaves = [y.detach().requires_grad_() for y in x]
        got = made(*leaves, attn_mask=mask, is_causal=is_causal)
        assert got.dtype == dtype
        reference = [y.detach().double().requires_grad_() for y in x]
        want = truth(made, *reference, None if mask is None or mask.dtype == torch.bool else mask.double(), is_causal)
        if mask is not None and mask.dtype == torch.bool:
            want = truth(made, *reference, mask, is_causal)
        torch.testing.assert_close(got.double(), want.double(), rtol=TYPES[dtype], atol=TYPES[dtype])
        gradients = (torch.autograd.grad(out.sum(), to) for out, to in ((got, leaves), (want, reference)))
        for mine, true in zip(*gradients, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=4 * TYPES[dtype], atol=8 * TYPES[dtype])


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 5), (5, 1)])
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
def test_no_tokens_on_one_side(spec: str, is_causal: bool, n: int, m: int) -> None:
    made = build(spec)
    q, k, v = (x.requires_grad_() for x in test_aft.tensors(spec, 2, 2, n, m, 4))
    if "conv" in spec or ("local" in spec and n != m and not is_causal):
        with pytest.raises(quest_core.QuestError, match="'aft-(conv|local)'"):
            made(q, k, v, is_causal=is_causal)
        return
    for mask in (None, torch.ones(2, 1, 1, m, dtype=torch.bool), torch.zeros(2, 1, 1, m, dtype=torch.float64)):
        out = made(q, k, v, attn_mask=mask, is_causal=is_causal)
        if m:
            torch.testing.assert_close(out, truth(made, q, k, v, mask, is_causal))
        assert out.shape == (2, 2, n, 4)
        assert m or not out.any()
        out.sum().backward()


@pytest.mark.parametrize("mode", ["meta", "fake"])
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
def test_shapes_without_numbers(spec: str, is_causal: bool, mode: str) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() if mode == "fake" else torch.device("meta"):
        made = quest_core.Mechanism(spec, num_heads=2, head_dim=4)
        for mask in (None, torch.ones(2, 1, 1, 9, dtype=torch.bool), torch.zeros(2, 1, 1, 9)):
            key_dim = 1 if "conv" in spec else 4
            x = [torch.empty(2, 2, 9, dim).requires_grad_() for dim in (4, key_dim, 4)]
            out = made(*x, attn_mask=mask, is_causal=is_causal)
            assert out.shape == (2, 2, 9, 4)
            out.sum().backward()
            assert [y.grad.shape for y in x if y.grad is not None] == [y.shape for y in x]


def test_a_large_grid_has_a_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PLAIN_WEIGHTS", 0), ("BLOCK_WEIGHTS", 1), ("BLOCK_ROWS", 3)):
        monkeypatch.setattr(blocks, name, value)
    twice(Call("aft-conv(dims=1)", False), "aft-conv(dims=1)")


def test_a_dynamic_square_is_refused() -> None:
    call, n = Call("aft-conv(window=3)", False), torch.export.Dim("n", min=2, max=96)
    with pytest.raises(quest_core.UnsupportedError, match="'aft-conv' does not support torch.export with a dynamic"):
        torch.export.export(call, inputs("aft-conv", 36), dynamic_shapes={name: {2: n} for name in "qkv"})
