"""The transforms of PyTorch: each function runs a cell through one of them, and raises if the result is wrong.

Every function takes a `Made` and returns nothing, or a note on what it could not try.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import quest_core
from devtools import versions

from .cases import (
    Cell,
    Deviation,
    Made,
    bounds,
    cast,
    check,
    compare,
    differentiable,
    earlier,
    gradients,
    names,
    rough,
    wanted,
    weight_of,
    with_gradients,
)


def zero_key(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors with a key of zeros, and those that share its memory: what no recorded graph may have frozen."""
    q, k, v, *mask = tensors
    stored = torch.empty(0, dtype=k.dtype).set_(k.untyped_storage()).clone()
    stored[torch.arange(len(stored)).as_strided(k.shape, k.stride(), k.storage_offset())[0, 0, -1]] = 0
    return q, stored.as_strided(k.shape, k.stride(), k.storage_offset()), v, *mask


def decode(made: Made) -> None:
    """Token by token with a cache: equal to the causal formula. The mask, if any, is one of keys."""
    made = Cell(made.cell.subject, made.cell.layout, made.cell.dtype, made.cell.mask, is_causal=True).made()
    q, k, v, *mask = made.tensors(min(made.lengths()[0], 7))
    caches = [quest_core.Cache() for _ in made.module.layers]
    outs = []
    for i in range(q.shape[2]):
        given = [x[:, :, i : i + 1] for x in (q, k, v)]
        seen = mask[0][..., : i + 1] if mask else None
        values = (earlier(given[2]), given[2])[-len(caches) :]
        for layer, cache, value in zip(made.module.layers, caches, values, strict=True):
            out = made.seeded(layer.decode)(*given[:2], value, cache, attn_mask=seen)
        outs.append(out.detach())
    check(made, (q, k, v, *mask), [torch.cat(outs, 2)])


def weights_returned(made: Made) -> None:
    """forward_with_logits: the plain formula, whose output and gradients are those of forward."""

    def call(parameters: Mapping[str, Tensor], *tensors: Tensor) -> Tensor:
        return made.call(parameters, *tensors, weights=True)

    tensors = made.tensors()
    check(made, tensors, gradients(made.seeded(call), made.named(), tensors, made.cell.dtype))


# Compilers.


def compile_static(made: Made, backend: str = "aot_eager") -> None:
    """torch.compile for one length at a time."""
    torch._dynamo.reset()
    compiled = torch.compile(made.module, backend=backend, dynamic=False, fullgraph=True)
    tensors = made.tensors()
    for given in (tensors, zero_key(tensors)):
        check(made, given, module_gradients(made, compiled, given))


def compile_dynamic(made: Made, backend: str = "aot_eager") -> None:
    """torch.compile(dynamic=True): one graph for all lengths."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend(backend)
    compiled = torch.compile(made.module, backend=counting, dynamic=True, fullgraph=True)
    first = None
    for tokens in made.lengths():
        given = made.tensors(tokens)
        check(made, given, module_gradients(made, compiled, given))
        # The first call may take its graph twice: Dynamo starts over when a float turns out to be a constant.
        first = counting.frame_count if first is None else first
        if counting.frame_count != first:
            raise Deviation(f"a graph of its own for length {tokens}, after {made.lengths()[0]}")


def _dynamic_shapes(made: Made, tensors: Sequence[Tensor]) -> dict[str, Any] | None:
    if made.single:
        return None
    most = 70 if str(made.config.family).startswith("aft") else 512  # below the max_length of learned positions
    n = torch.export.Dim("n", min=2, max=most)
    m = torch.export.Dim("m", min=2, max=most) if made.cell.cross else n
    shapes: dict[str, Any] = {"q": {2: n}, "k": {2: m}, "v": {2: m}}
    if len(tensors) > 3:
        mask = tensors[3]
        axes = {mask.dim() - 2: n, mask.dim() - 1: m}
        shapes["mask"] = {axis: dim for axis, dim in axes.items() if mask.shape[axis] > 1}
    return shapes


def export(made: Made) -> None:
    """torch.export with a dynamic length."""
    tensors = made.tensors()
    module = torch.export.export(made.module, tensors, dynamic_shapes=_dynamic_shapes(made, tensors)).module()
    for tokens in made.lengths():
        given = zero_key(made.tensors(tokens))
        with torch.no_grad():
            check(made, given, [made.seeded(module)(*given)])


def onnx(made: Made) -> None:
    """torch.onnx.export(dynamo=True), run by onnxruntime."""
    versions.needs_torch("2.6", "torch.onnx.export(dynamo=True) of dynamic shapes")
    import onnxruntime

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is not installed
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        tensors = made.tensors()
        shapes = _dynamic_shapes(made, tensors)
        program = torch.onnx.export(made.module, tensors, dynamic_shapes=shapes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    inputs = [one.name for one in session.get_inputs()]
    for tokens in made.lengths():
        given = zero_key(made.tensors(tokens))
        feed = {name: x.numpy() for name, x in zip(inputs, given, strict=True)}
        (out,) = session.run(None, feed)
        check(made, given, [torch.from_numpy(out)])


def jit_trace(made: Made) -> str | None:
    """torch.jit.trace, run on other values and at other lengths."""
    tensors = made.tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(made.module, tensors, check_trace=False)
    given = zero_key(made.tensors(seed=1))
    check(made, given, module_gradients(made, traced, given))
    for tokens in made.lengths()[1:]:
        other = made.tensors(tokens)
        try:
            with torch.no_grad():
                out = made.seeded(traced)(*other)
        except RuntimeError:
            return "the traced length"
        check(made, other, [out])
    return None


def module_gradients(made: Made, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of a callable that holds the parameters itself."""
    leaves = [x if not x.is_floating_point() else x.detach().requires_grad_() for x in tensors]
    return with_gradients(made.seeded(function)(*leaves), differentiable(leaves, made.named()))


# Fake tensors and recorded graphs.


def fake(made: Made) -> None:
    """FakeTensorMode: the shapes and types of the output and of gradients."""
    tensors = made.tensors()
    state = {name: x.detach().clone() for name, x in made.module.state_dict().items()}
    real = gradients(made.seeded(made.call), made.named(), tensors, made.cell.dtype)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    leaves = [mode.from_tensor(x.detach()) for x in tensors]
    state = {name: mode.from_tensor(x) for name, x in state.items()}
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in leaves]
    learned = {name: state[name].requires_grad_() for name in made.named()}
    with mode:
        out = torch.func.functional_call(made.module, {**state, **learned}, tuple(leaves))
        sources = [*leaves[:3], *learned.values()]
        found = torch.autograd.grad(out, sources, torch.ones_like(out), allow_unused=True)
    expected = [*real[:4], *real[len(real) - len(learned) :]]
    for a, b in zip((out, *found), expected, strict=True):
        if a is not None and (a.shape != b.shape or a.dtype != b.dtype):
            raise Deviation(f"a fake result is {a.dtype} {list(a.shape)}, the real one {b.dtype} {list(b.shape)}")


def fx(made: Made, mode: str) -> None:
    """make_fx of output and gradients, replayed on other values, and with "symbolic" sizes at other lengths."""
    own, lengths = list(made.named()), made.lengths()[: None if mode == "symbolic" else 1]
    buffers = dict(made.module.named_buffers())

    def both(*flat: Tensor) -> list[Tensor]:
        state = dict(zip([*own, *buffers], flat, strict=False))
        tensors = flat[len(state) :]
        out = made.call(state, *tensors)
        return with_gradients(out, [*tensors[:3], *flat[: len(own)]])

    def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
        every = [*made.named().values(), *tensors]
        every = [x.detach().requires_grad_() if x.is_floating_point() else x for x in every]
        return [*every[: len(own)], *(x.clone() for x in buffers.values()), *every[len(own) :]]

    graph = make_fx(both, tracing_mode=mode)(*leaves(made.tensors(lengths[0])))
    for tokens in lengths:
        given = zero_key(made.tensors(tokens, seed=1))
        got = made.seeded(graph)(*leaves(given))
        _check_without_mask(made, given, [x.detach() for x in got])


def _check_without_mask(made: Made, tensors: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """As `check`, where the gradient of an additive mask was not asked for."""
    exact, allowed = wanted(made, tensors)
    what = names(made, tensors)
    kept = [i for i, name in enumerate(what) if name != "gradient of mask"]
    compare(got, [exact[i] for i in kept], [allowed[i] for i in kept], made.cell.dtype, [what[i] for i in kept])


# torch.func and derivatives.

SAMPLES = 3


def vmap(made: Made) -> None:
    """torch.func.vmap over q, k and v, over q only, and over the last axis of q."""
    several = [made.tensors(seed=i) for i in range(SAMPLES)]
    mask = several[0][3:]
    q, k, v = (torch.stack([one[i] for one in several]) for i in range(3))
    parameters = made.named()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return made.call(parameters, q, k, v, *mask)

    for axes in ((0, 0, 0), (0, None, None), (None, 0, 0), (-1, 0, 0)):
        given = (q if axes[0] == 0 else q[0] if axes[0] is None else q.movedim(0, -1), *(
            x if axis == 0 else x[0] for x, axis in zip((k, v), axes[1:], strict=True)
        ))  # fmt: skip
        out = made.seeded(torch.func.vmap(function, in_dims=axes, randomness="same"))(*given)
        for i in range(SAMPLES):
            one = tuple(x[i] if axis is not None else x[0] for x, axis in zip((q, k, v), axes, strict=True))
            check(made, (*one, *mask), [out[i].detach()])


def func_grad(made: Made) -> None:
    """torch.func.grad by tensors and parameters, and vmap of it."""
    tensors = made.tensors()
    mask = tensors[3:]

    def loss(parameters: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = made.call(parameters, q, k, v, *mask)
        return (out * weight_of(out)).sum(), out

    take = torch.func.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    parameters = {name: x.detach() for name, x in made.named().items()}

    def checked(one: Sequence[Tensor], found: Any, out: Tensor) -> None:
        learned, *others = found
        _check_without_mask(made, (*one, *mask), [out, *others, *learned.values()])

    found, out = made.seeded(take)(parameters, *tensors[:3])
    checked(tensors[:3], found, out)
    several = [made.tensors(seed=i)[:3] for i in range(SAMPLES)]
    stacked = [torch.stack([one[i] for one in several]) for i in range(3)]
    found, out = made.seeded(torch.func.vmap(take, in_dims=(None, 0, 0, 0), randomness="same"))(parameters, *stacked)
    for i, one in enumerate(several):
        checked(one, ({n: x[i] for n, x in found[0].items()}, *(x[i] for x in found[1:])), out[i])


def _derivative(made: Made, function: Callable[..., Tensor], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Any:
    """A function of q, k and v in some type."""
    learned = {name: x.detach().to(dtype) for name, x in made.named().items()}
    return lambda q, k, v: made.seeded(function)(learned, q, k, v, *tensors[3:])


def func_jacrev(made: Made) -> None:
    """torch.func.jacrev by k."""
    tensors = made.tensors()
    results = []
    for function, dtype in _versions(made):
        q, k, v = (x.to(dtype) for x in tensors[:3])
        results.append(torch.func.jacrev(_derivative(made, function, dtype, tensors), argnums=1)(q, k, v))
    got, exact, plain = results
    compare([got], [exact], bounds(made, [exact], [plain], tensors), made.cell.dtype, ["jacobian by k"])


def _versions(made: Made) -> Sequence[tuple[Callable[..., Tensor], torch.dtype]]:
    """What is tested, the truth, and the plain formula whose error says what rounding does."""
    return (made.call, made.cell.dtype), (made.reference, torch.float64), (made.reference, rough(made))


def func_jvp(made: Made) -> None:
    """torch.func.jvp, and forward-mode differentiation by dual numbers."""
    tensors = made.tensors()
    tangents = [_tangent(x) for x in tensors[:3]]
    results = []
    for function, dtype in _versions(made):
        run = _derivative(made, function, dtype, tensors)
        point = tuple(cast(x, dtype) for x in tensors[:3])
        results.append(list(torch.func.jvp(run, point, tuple(cast(x, dtype) for x in tangents))))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, cast(t, x.dtype)) for x, t in zip(tensors[:3], tangents, strict=True)]
        dual = _derivative(made, made.call, made.cell.dtype, tensors)(*duals)
        by_dual = list(forward_ad.unpack_dual(dual))
    got, exact, plain = results
    limits = bounds(made, exact, plain, tensors)
    for one in (got, by_dual):
        compare(one, exact, limits, made.cell.dtype, ["output", "tangent"])


def _tangent(x: Tensor) -> Tensor:
    """A direction that lies in memory as x does, which PyTorch requires where elements share memory."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return torch.sin(torch.arange(count, dtype=torch.float64)).as_strided(x.shape, x.stride(), x.storage_offset())


def second_derivative(made: Made) -> None:
    """The gradient of a function of the gradient (create_graph=True)."""
    tensors = made.tensors()
    results, least = [], 0.0
    for function, dtype in _versions(made):
        learned = {name: x.detach().to(dtype).requires_grad_() for name, x in made.named().items()}
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
        out = made.seeded(function)(learned, *leaves, *tensors[3:])
        sources = [*leaves, *learned.values()]
        first = torch.autograd.grad(out, sources, weight_of(out), create_graph=True, allow_unused=True)
        total = sum((weight_of_any(g) * g).sum() for g in first if g is not None)
        least = max([least, *(float(g.detach().abs().max()) for g in first if g is not None and g.numel())])
        results.append(with_gradients(total, sources, torch.ones_like(total))[1:])
    got, exact, plain = results
    what = [f"second derivative by {name}" for name in ("q", "k", "v", *made.named())]
    least *= max(1.0, made.large_logit(tensors))  # which steepens each derivative
    compare(got, exact, bounds(made, exact, plain, tensors, least), made.cell.dtype, what)


def weight_of_any(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(x.numel(), dtype=torch.float64) * 0.7).reshape(x.shape).to(x.dtype)


def second_derivative_math(made: Made) -> None:
    """As `second_derivative`, inside sdpa_kernel(SDPBackend.MATH), as our refusal says."""
    with sdpa_kernel(SDPBackend.MATH):
        second_derivative(made)


def autocast(made: Made) -> None:
    """torch.autocast around tensors and parameters of float32: the output is bfloat16, gradients are float32."""
    made = dataclasses.replace(made.cell, dtype=torch.float32).made()
    lower = copy.copy(made)
    lower.cell = dataclasses.replace(made.cell, dtype=torch.bfloat16)
    tensors = made.tensors()
    if made.draws:  # in the type of the weights, which an additive mask widens
        tensors = tensors[:3]

    def call(parameters: Mapping[str, Tensor], *given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made.call(parameters, *given)

    out, *found = gradients(made.seeded(call), made.named(), tensors, torch.float32)
    truth, *exact = gradients(lower.reference, made.named(), tensors, torch.float64)
    limits = bounds(lower, [truth, *exact], gradients(lower.reference, made.named(), tensors, torch.bfloat16), tensors)
    what = names(made, tensors)
    compare([out], [truth], limits[:1], torch.bfloat16, what[:1])
    compare(found, exact, limits[1:], torch.float32, what[1:])


TRANSFORMS: Mapping[str, Callable[[Made], str | None]] = {
    "decode": decode,
    "weights returned": weights_returned,
    "compile, one length": compile_static,
    "compile, any length": compile_dynamic,
    "export": export,
    "ONNX": onnx,
    "jit.trace": jit_trace,
    "FakeTensorMode": fake,
    "make_fx": functools.partial(fx, mode="real"),
    "make_fx, any length": functools.partial(fx, mode="symbolic"),
    "func.vmap": vmap,
    "func.grad": func_grad,
    "func.jacrev": func_jacrev,
    "func.jvp": func_jvp,
    "second derivative": second_derivative,
    "second derivative, math kernel": second_derivative_math,
    "autocast": autocast,
}

SLOW: Mapping[str, Callable[[Made], str | None]] = {
    "inductor, one length": functools.partial(compile_static, backend="inductor"),
    "inductor, any length": functools.partial(compile_dynamic, backend="inductor"),
}
"""Needs a C++ compiler, and seconds to minutes a cell."""
