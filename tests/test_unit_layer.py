"""kernels.unit_layer: QUEST and its projections in one step, against the two one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from quest_core import Attention, Monitor
from quest_core.errors import InputError, UnsupportedError
from quest_core.kernels import unit_layer, unit_layer_parameters
from quest_core.mechanisms import mechanism as module
from quest_core.mechanisms import reference


def projections(features: int, width: int, value_width: int, *, bias: bool = True) -> tuple[nn.Linear, ...]:
    return tuple(nn.Linear(features, size, bias, dtype=torch.float64) for size in (width, width, value_width))


def step(
    x: Tensor, layers: tuple[nn.Linear, ...], num_heads: int, residual: Tensor | None
) -> tuple[Tensor | None, ...]:
    parameters = unit_layer_parameters(x, layers, num_heads, residual)
    assert parameters is not None
    out, *nothing = unit_layer(x, parameters, num_heads, residual, with_logits=False)
    made = unit_layer(x, parameters, num_heads, residual, with_logits=True)
    torch.testing.assert_close(out, made[0], rtol=0, atol=0)
    assert nothing == [None, None]
    return made


def plainly(x: Tensor, layers: tuple[nn.Linear, ...], num_heads: int, residual: Tensor | None) -> tuple[Tensor, ...]:
    """What `step` is to return."""
    q, k, v = (layer(x).unflatten(-1, (num_heads, -1)).transpose(1, 2) for layer in layers)
    scores = reference.quest(q, k) + (0 if residual is None else residual)
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights, scores


@given(
    batch=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    tokens=st.integers(1, 6),
    dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    features=st.integers(1, 6),
    bias=st.booleans(),
    residual=st.booleans(),
    strided=st.booleans(),
    read=st.sets(st.integers(0, 2), min_size=1),
    frozen=st.sets(st.integers(0, 3)),
)
def test_equals_projecting_and_attending_with_the_gradients_of_every_output(
    batch: int, num_heads: int, tokens: int, dim: int, value_dim: int, features: int, bias: bool, residual: bool,
    strided: bool, read: set[int], frozen: set[int],
) -> None:  # fmt: skip
    layers = projections(features, num_heads * dim, num_heads * value_dim, bias=bias)
    x = torch.randn(batch, features, tokens).mT if strided else torch.randn(batch, tokens, features)
    x = x.double().requires_grad_(3 not in frozen)
    for i in frozen - {3}:
        layers[i].requires_grad_(False)
    added = torch.randn(batch, num_heads, tokens, tokens, dtype=x.dtype, requires_grad=True) if residual else None
    got, truth = step(x, layers, num_heads, added), plainly(x, layers, num_heads, added)
    for ours, theirs in zip(got, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    inputs = [x, *(p for layer in layers for p in layer.parameters()), *([] if added is None else [added])]
    inputs = [x for x in inputs if x.requires_grad]
    outs = [i for i in sorted(read) if truth[i].requires_grad]
    assert [out is not None and out.requires_grad for out in got] == [out.requires_grad for out in truth]
    if not outs:
        return
    grads = [torch.randn_like(truth[i]) for i in outs]
    ours, theirs = (
        torch.autograd.grad([out[i] for i in outs], inputs, grads, allow_unused=True)  # type: ignore[misc]
        for out in (got, truth)
    )
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert (a is None) == (b is None), i
        else:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_what_it_returns_may_be_changed_in_place(num_heads: int) -> None:
    layers, x = projections(4, 4, 4), torch.randn(2, 5, 4, dtype=torch.float64)
    out, _, scores = step(x, layers, num_heads, None)
    assert out is not None
    assert scores is not None
    truth, _, logits = plainly(x, layers, num_heads, None)
    out *= 2
    scores.masked_fill_(scores > 0, 0)
    parameters = [p for layer in layers for p in layer.parameters()]
    ours = torch.autograd.grad(out.sum() + scores.sum(), parameters)
    theirs = torch.autograd.grad(2 * truth.sum() + logits.masked_fill(logits > 0, 0).sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradients_are_accumulated_cleared_and_clipped_as_any_others() -> None:
    layers, x = nn.ModuleList(projections(4, 4, 4)), torch.randn(2, 5, 4, dtype=torch.float64)
    plain = copy.deepcopy(layers)
    for owned, attend in ((layers, step), (plain, plainly)):
        optimizer = torch.optim.AdamW(owned.parameters(), 0.1)
        for _ in range(3):
            for _ in range(2):
                out = attend(x, tuple(owned), 2, None)[0]  # type: ignore[arg-type]
                assert out is not None
                out.square().sum().backward()
            nn.utils.clip_grad_norm_(owned.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for a, b in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_gradcheck() -> None:
    layers, x = projections(3, 4, 2), torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    parameters = unit_layer_parameters(x, layers, 2, residual)
    assert parameters is not None

    def call(x: Tensor, residual: Tensor, *parameters: Tensor) -> Any:
        return unit_layer(x, parameters, 2, residual, with_logits=True)

    assert torch.autograd.gradcheck(call, (x, residual, *parameters), fast_mode=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for every time that a layer took the step."""
    taken: list[bool] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        taken.append(True)
        return unit_layer(*arguments, **options)

    monkeypatch.setattr(module, "unit_layer", counted)
    return taken


def test_a_layer_takes_it_and_gives_the_same(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32, requires_grad=True)

    def results() -> tuple[Tensor, ...]:
        out = layer(x)
        return (out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters())))

    fast = results()
    assert calls == [True]
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), fast[0])
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    slow = results()
    assert calls == [True, True]
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def replace_weight(linear: nn.Linear) -> None:
    weight = linear.weight.detach().clone()
    del linear.weight
    linear.weight = weight  # type: ignore[assignment]  # as FullyShardedDataParallel does


class OwnLinear(nn.Linear):
    """A linear layer that does something of its own."""


def hooked(layer: Attention, method: str, part: str) -> None:
    getattr(layer.get_submodule(part), method)(lambda *_: None)


CHANGES: dict[str, Callable[[Attention], Any]] = {
    "a forward hook": lambda layer: hooked(layer, "register_forward_hook", "q_proj"),
    "a hook before the call": lambda layer: hooked(layer, "register_forward_pre_hook", "k_proj"),
    "a backward hook": lambda layer: hooked(layer, "register_full_backward_hook", "v_proj"),
    "a hook before the backward pass": lambda layer: hooked(layer, "register_full_backward_pre_hook", "v_proj"),
    "a hook on the mechanism": lambda layer: hooked(layer, "register_forward_hook", "mechanism"),
    "a forward of one module": lambda layer: setattr(layer.k_proj, "forward", layer.k_proj.forward),
    "a subclass": lambda layer: setattr(layer, "q_proj", OwnLinear(32, 32)),
    "a parametrisation": lambda layer: parametrizations.weight_norm(layer.q_proj),
    "a weight that is no parameter": lambda layer: replace_weight(layer.v_proj),
    "another type": lambda layer: layer.double(),
    "a monitor": lambda layer: Monitor(layer),
    "no bias in one": lambda layer: setattr(layer, "k_proj", nn.Linear(32, 32, bias=False)),
}


@pytest.fixture
def everywhere() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_somebody_changed_is_called_part_by_part(change: str, calls: list[bool]) -> None:
    layer = Attention(32, 2, "quest")
    kept = CHANGES[change](layer)  # noqa: F841  # a monitor lives as long as somebody holds it
    x = torch.randn(3, 29, 32, dtype=layer.out_proj.weight.dtype)
    layer(x)
    assert calls == ([True] if change == "no bias in one" else [])


@pytest.mark.usefixtures("everywhere")
def test_a_hook_on_all_modules_sees_the_projections(calls: list[bool]) -> None:
    Attention(32, 2, "quest")(torch.randn(3, 29, 32))
    assert calls == []


@pytest.mark.parametrize("spec", ["standard", "quest(kv_heads=1)", "quest+sigmoid", "quest(scale=0.5)", "linear"])
def test_other_mechanisms_do_not_take_it(spec: str, calls: list[bool]) -> None:
    Attention(32, 2, spec)(torch.randn(3, 29, 32))
    assert calls == []


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"key_mask": torch.ones(3, 29, dtype=torch.bool)}, 29),
        ({"attn_mask": torch.zeros(29, 29)}, 29),
        ({"is_causal": True}, 29),
        ({"context": torch.randn(3, 29, 32)}, 29),
        ({}, 200),  # PyTorch's kernel is faster
    ],
)
def test_other_calls_do_not_take_it(options: dict[str, Any], tokens: int, calls: list[bool]) -> None:
    Attention(32, 2, "quest")(torch.randn(3, tokens, 32), **options)
    assert calls == []


def test_dropout_and_autocast_do_not_take_it(calls: list[bool]) -> None:
    layer, x = Attention(32, 2, "quest", dropout=0.1), torch.randn(3, 29, 32)
    layer(x)
    with torch.autocast("cpu"):
        layer.eval()(x)
    assert calls == []
    layer(x)
    assert calls == [True]


def with_heads(layer: Attention, number: int) -> Attention:
    """The layer with so many heads' projections, as pruning or dividing them by hand leaves it."""
    width = number * layer.head_dim
    layer.q_proj, layer.k_proj, layer.v_proj = (nn.Linear(32, width) for _ in range(3))
    layer.out_proj = nn.Linear(width, 32)
    return layer


def test_heads_are_counted_from_the_projections(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = with_heads(Attention(32, 4, "quest"), 2), torch.randn(3, 29, 32)
    out = layer(x)
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    torch.testing.assert_close(out, layer(x))
    assert calls == []


def test_values_of_more_heads_are_refused() -> None:
    layer = Attention(32, 4, "quest")
    layer.v_proj, layer.out_proj = nn.Linear(32, 64), nn.Linear(64, 32)
    with pytest.raises(InputError, match=r"k has \(heads, tokens\) \(4, 29\) but v has \(8, 29\)"):
        layer(torch.randn(3, 29, 32))


class Around(nn.Module):
    """A module in another's place, as an adapter or a probe is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.inner(*arguments, **options)


def test_a_module_around_the_mechanism_is_called() -> None:
    layer, seen = Attention(32, 2, "quest"), []
    around: Any = Around(layer.mechanism)
    layer.mechanism = around
    around.register_forward_hook(lambda *_: seen.append(True))
    layer(torch.randn(3, 29, 32))
    assert seen == [True]


class SquaredWeights(TorchFunctionMode):
    """Changes what a linear layer does, derivative included, as simulated quantisation does."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.functional.linear:
            arguments = (arguments[0], arguments[1] * arguments[1].abs(), *arguments[2:])
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("how", ["a mode", "another function", "another method"])
def test_other_linear_layers_keep_their_derivative(
    how: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.functional.linear
    if how == "another function":
        monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: linear(x, w * w.abs(), b))
    elif how == "another method":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: linear(x, self.weight.square(), self.bias))
    with SquaredWeights() if how == "a mode" else nullcontext():
        Attention(32, 2, "quest")(torch.randn(3, 29, 32))
    assert calls == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_can_be_computed_again_in_the_backward_pass(reentrant: bool, calls: list[bool]) -> None:
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    for parameter, truth in zip((x, *layer.parameters()), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, truth)
    assert len(calls) == 3


def test_gradients_may_be_asked_for_in_batches() -> None:
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32, requires_grad=True)
    out, grads = layer(x), torch.randn(4, 3, 29, 32)
    (batched,) = torch.autograd.grad(out, x, grads, retain_graph=True, is_grads_batched=True)
    for ours, grad in zip(batched, grads, strict=True):
        torch.testing.assert_close(ours, torch.autograd.grad(out, x, grad, retain_graph=True)[0])


def test_what_no_gradient_needs_may_change_after_the_forward_pass() -> None:
    """A linear layer keeps its input for the weight's gradient and its weight for the input's."""
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32)
    out = layer(x)
    with torch.no_grad():
        layer.q_proj.weight.mul_(2)
    out.sum().backward()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.requires_grad_(False)
    stream = torch.randn(3, 29, 32, requires_grad=True) * 1
    out = layer(stream)
    stream += out
    stream.sum().backward()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.bias.requires_grad_()
    with torch.inference_mode():
        constant = torch.randn(3, 29, 32)
    layer(constant).sum().backward()


@pytest.mark.parametrize("strided", [True, False])
def test_a_changed_input_is_noticed(strided: bool) -> None:
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x
    out = layer(x)
    x += 1
    if strided:
        out.sum().backward()  # what was kept is a copy
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_features_that_do_not_fit_are_told_by_the_projection() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Attention(32, 2, "quest")(torch.randn(3, 29, 31))


def test_second_derivatives_are_refused_with_the_way_out() -> None:
    layer, x = Attention(32, 2, "quest"), torch.randn(3, 29, 32, requires_grad=True)
    with pytest.raises(UnsupportedError, match="QUEST_KERNELS=reference"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
