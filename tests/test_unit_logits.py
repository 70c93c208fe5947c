"""kernels.unit_logits: QUEST in one step, against the reference and against the steps it replaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quest_core import Attention, mechanism
from quest_core.errors import UnsupportedError
from quest_core.kernels import unit_attention, unit_attention_with_logits, unit_logits, unit_logits_applies
from quest_core.mechanisms import mechanism as module
from quest_core.mechanisms import reference


def heads(
    batch: int, number: int, tokens: int, dim: int, *, strided: bool, dtype: torch.dtype = torch.float64
) -> Tensor:
    """[B, H, N, D], laid out as a projection leaves it or without gaps."""
    if strided:
        return torch.randn(batch, tokens, number, dim, dtype=dtype).transpose(1, 2)
    return torch.randn(batch, number, tokens, dim, dtype=dtype)


@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    n=st.integers(1, 7),
    m=st.integers(1, 7),
    dim=st.integers(1, 9),
    scale=st.sampled_from([1.0, 0.3]),
    strided=st.booleans(),
    residual=st.booleans(),
    silent=st.booleans(),
)
def test_equals_the_reference_with_its_gradients(
    batch: int, groups: int, per_group: int, n: int, m: int, dim: int, scale: float, strided: bool, residual: bool,
    silent: bool,
) -> None:  # fmt: skip
    q = heads(batch, groups * per_group, n, dim, strided=strided)
    k = heads(batch, groups, m, dim, strided=strided)
    if silent:
        k[:, :, -1] = 0
    inputs = [q, k] + ([torch.randn(batch, groups * per_group, n, m, dtype=q.dtype)] if residual else [])
    for x in inputs:
        x.requires_grad_()
    assert unit_logits_applies(*inputs)
    got = unit_logits(q, k, scale, *inputs[2:])
    truth = scale * reference.quest(q, k.repeat_interleave(per_group, 1))
    if residual:
        truth = truth + inputs[2]
    grad = torch.randn_like(truth)
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(truth, inputs, grad), strict=True
    ):
        # The reference has no slope at a zero key (0/0), where ours is 0.
        torch.testing.assert_close(ours, theirs.nan_to_num() if silent else theirs, rtol=1e-10, atol=1e-10)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What `unit_attention` is to return, by the plain formula."""
    per_group = q.shape[1] // k.shape[1]
    scores = scale * reference.quest(q, k.repeat_interleave(per_group, 1))
    scores = scores if residual is None else scores + residual
    weights = scores.softmax(-1)
    return weights @ v.repeat_interleave(per_group, 1), weights, scores


@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    n=st.integers(1, 7),
    m=st.integers(1, 7),
    dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    scale=st.sampled_from([1.0, 0.3]),
    strided=st.booleans(),
    residual=st.booleans(),
    read=st.sets(st.integers(0, 2), min_size=1),
)
def test_attention_equals_the_reference_with_the_gradients_of_every_output(
    batch: int, groups: int, per_group: int, n: int, m: int, dim: int, value_dim: int, scale: float, strided: bool,
    residual: bool, read: set[int],
) -> None:  # fmt: skip
    q = heads(batch, groups * per_group, n, dim, strided=strided)
    k = heads(batch, groups, m, dim, strided=strided)
    v = heads(batch, groups, m, value_dim, strided=strided)
    added = torch.randn(batch, groups * per_group, n, m, dtype=q.dtype) if residual else None
    inputs = [x.requires_grad_() for x in (q, k, v, added) if x is not None]
    got, truth = unit_attention_with_logits(q, k, v, scale, added), attended(q, k, v, scale, added)
    for ours, theirs in zip(got, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grads = [torch.randn_like(truth[i]) for i in sorted(read)]
    ours, theirs = (
        torch.autograd.grad([out[i] for i in sorted(read)], inputs, grads, allow_unused=True) for out in (got, truth)
    )
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert (a is None) == (b is None), i
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_what_it_returns_may_be_changed_in_place() -> None:
    q, k, v = (heads(2, 2, 5, 4, strided=True).requires_grad_() for _ in range(3))
    out, weights, scores = unit_attention_with_logits(q, k, v, 1.0)
    truth, _, logits = attended(q, k, v, 1.0, None)
    out *= 2
    scores.masked_fill_(scores > 0, 0)
    ours = torch.autograd.grad(out.sum() + scores.sum(), (q, k, v))
    theirs = torch.autograd.grad(2 * truth.sum() + logits.masked_fill(logits > 0, 0).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    out, weights, _ = unit_attention_with_logits(q, k, v, 1.0)
    weights.mul_(2)  # the derivative needs the weights as they were
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradcheck() -> None:
    q, k = (heads(2, 2, 3, 4, strided=True).requires_grad_() for _ in range(2))
    residual = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: unit_logits(*x[:2], 0.7, *x[2:]), (q, k, residual), fast_mode=True)
    v = heads(2, 2, 3, 5, strided=True).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: unit_attention_with_logits(*x[:3], 0.7, *x[3:]), (q, k, v, residual), fast_mode=True
    )


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_gives_gradients_to_those_that_want_them(wanted: tuple[bool, bool]) -> None:
    q, k = (heads(1, 2, 3, 4, strided=False).requires_grad_(wants) for wants in wanted)
    for out in (unit_logits(q, k, 1.0), unit_attention(q, k, heads(1, 2, 3, 4, strided=False), 1.0)):
        q.grad = k.grad = None
        out.square().sum().backward()
        assert [x.grad is not None for x in (q, k)] == list(wanted)


def test_values_alone_may_want_a_gradient() -> None:
    """Frozen queries and keys make weights without one, which can be read, and nothing is computed for them."""
    q, k, v = (heads(2, 2, 5, 4, strided=True) for _ in range(3))
    v.requires_grad_()
    out, weights, scores = unit_attention_with_logits(q, k, v, 1.0)
    truth, _, _ = attended(q, k, v, 1.0, None)
    assert (out.requires_grad, weights.requires_grad, scores.requires_grad) == (True, False, False)
    assert weights.numpy().sum(-1) == pytest.approx(1)
    grad = torch.randn_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (ours,) = torch.autograd.grad(out, v, grad)
    (theirs,) = torch.autograd.grad(truth, v, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert {event.key: event.count for event in profile.key_averages()}["aten::bmm"] == 1


@pytest.mark.parametrize("spec", ["quest", "quest(kv_heads=2)", "quest+mqa", "quest(scale=0.5)"])
@pytest.mark.parametrize("asked", ["weights", "weights under a mask", "output alone"])
def test_mechanisms_take_it_and_give_the_same(spec: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mechanism(spec, num_heads=4, head_dim=8)
    groups = {"quest(kv_heads=2)": 2, "quest+mqa": 1}.get(spec, 4)
    q = heads(2, 4, 29, 8, strided=True, dtype=torch.float32).requires_grad_()
    k, v = (heads(2, groups, 29, 8, strided=True, dtype=torch.float32).requires_grad_() for _ in range(2))
    mask = torch.rand(2, 1, 1, 29) < 0.8 if asked == "weights under a mask" else None
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return call

    for name, function in (
        ("unit_logits", unit_logits),
        ("unit_attention", unit_attention),
        ("unit_attention_with_logits", unit_attention_with_logits),
    ):
        monkeypatch.setattr(module, name, counted(name, function))
    grad = torch.randn(2, 4, 29, 8)

    def results() -> tuple[Tensor, ...]:
        if asked == "output alone":
            outs: tuple[Tensor, ...] = (made(q, k, v),)
        else:
            outs = made.forward_with_weights(q, k, v, attn_mask=mask)
        return (*outs, *torch.autograd.grad(outs[0], (q, k, v), grad))

    fast = results()
    expected = ["unit_attention"]
    if asked != "output alone":
        expected = ["unit_logits" if mask is not None else "unit_attention_with_logits"]
    assert calls == expected
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    slow = results()
    assert calls == expected
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", ["weights", "weights under a mask", "output alone"])
def test_second_derivatives_are_refused_with_the_way_out(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mechanism("quest", num_heads=2, head_dim=4)
    q, k, v = (heads(1, 2, 20, 4, strided=False, dtype=torch.float32).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril() if asked == "weights under a mask" else None

    def twice() -> Tensor:
        out = made(q, k, v) if asked == "output alone" else made.forward_with_weights(q, k, v, attn_mask=mask)[0]
        (slope,) = torch.autograd.grad(out.sum(), k, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), k)
        return curve

    with pytest.raises(UnsupportedError, match=r"QUEST_KERNELS=reference.*sdpa_kernel\(SDPBackend.MATH\)"):
        twice()
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    with sdpa_kernel(SDPBackend.MATH):
        assert twice().isfinite().all()


@pytest.mark.filterwarnings("ignore")  # torch.jit is old, and says what a trace leaves out
def test_a_traced_layer_can_be_saved(tmp_path: Path) -> None:
    layer, x = Attention(16, 2, "quest").eval(), torch.randn(2, 20, 16)
    torch.jit.trace(layer, (x,)).save(tmp_path / "layer.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x), layer(x))


def test_does_not_apply_where_it_could_not_keep_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (heads(1, 2, 3, 4, strided=False, dtype=torch.float32) for _ in range(2))
    assert unit_logits_applies(q, k)
    assert not unit_logits_applies(q.bfloat16(), k.bfloat16())
    assert unit_logits_applies(q, k, torch.zeros(1, 2, 3, 3))
    assert not unit_logits_applies(q, k, torch.zeros(3, 3))
    assert not unit_logits_applies(q, k, torch.zeros(1, 2, 3, 3, dtype=torch.float64))
    assert not unit_logits_applies(q, k, nn.Parameter(torch.zeros(1, 2, 3, 3)))
    assert not unit_logits_applies(q[:, :, :0], k)
    with torch.autocast("cpu"):
        assert not unit_logits_applies(q, k)
    monkeypatch.setenv("QUEST_KERNELS", "eager")
    assert not unit_logits_applies(q, k)
