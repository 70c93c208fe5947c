"""kernels.unit_logits: QUEST's logits in one step, against the reference and against the steps it replaces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quest_core import mechanism
from quest_core.errors import UnsupportedError
from quest_core.kernels import unit_logits, unit_logits_applies
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


def test_gradcheck() -> None:
    q, k = (heads(2, 2, 3, 4, strided=True).requires_grad_() for _ in range(2))
    residual = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: unit_logits(*x[:2], 0.7, *x[2:]), (q, k, residual), fast_mode=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_gives_gradients_to_those_that_want_them(wanted: tuple[bool, bool]) -> None:
    q, k = (heads(1, 2, 3, 4, strided=False).requires_grad_(wants) for wants in wanted)
    unit_logits(q, k, 1.0).sum().backward()
    assert [x.grad is not None for x in (q, k)] == list(wanted)


@pytest.mark.parametrize("spec", ["quest", "quest(kv_heads=2)", "quest+mqa", "quest(scale=0.5)"])
@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "output alone"])
def test_mechanisms_take_it_and_give_the_same(spec: str, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mechanism(spec, num_heads=4, head_dim=8)
    groups = {"quest(kv_heads=2)": 2, "quest+mqa": 1}.get(spec, 4)
    q = heads(2, 4, 29, 8, strided=True, dtype=torch.float32).requires_grad_()
    k, v = (heads(2, groups, 29, 8, strided=True, dtype=torch.float32).requires_grad_() for _ in range(2))
    calls: list[int] = []

    def counted(*arguments: Tensor) -> Tensor:
        calls.append(1)
        return unit_logits(*arguments)

    monkeypatch.setattr(module, "unit_logits", counted)
    grad = torch.randn(2, 4, 29, 8)

    def results() -> tuple[Tensor, ...]:
        outs = made.forward_with_weights(q, k, v) if weights else (made(q, k, v),)
        return (*outs, *torch.autograd.grad(outs[0], (q, k, v), grad))

    fast = results()
    assert calls == [1]
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    slow = results()
    assert calls == [1]
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mechanism("quest", num_heads=2, head_dim=4)
    q, k, v = (heads(1, 2, 5, 4, strided=False).requires_grad_() for _ in range(3))

    def twice() -> Tensor:
        (slope,) = torch.autograd.grad(made.forward_with_weights(q, k, v)[0].sum(), k, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), k)
        return curve

    with pytest.raises(UnsupportedError, match="QUEST_KERNELS=reference"):
        twice()
    monkeypatch.setenv("QUEST_KERNELS", "reference")
    assert twice().isfinite().all()


def test_does_not_apply_where_it_could_not_keep_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (heads(1, 2, 3, 4, strided=False, dtype=torch.float32) for _ in range(2))
    assert unit_logits_applies(q, k)
    assert not unit_logits_applies(q.bfloat16(), k.bfloat16())
    assert not unit_logits_applies(q, k, torch.zeros(3, 3))
    assert not unit_logits_applies(q[:, :, :0], k)
    with torch.autocast("cpu"):
        assert not unit_logits_applies(q, k)
    monkeypatch.setenv("QUEST_KERNELS", "eager")
    assert not unit_logits_applies(q, k)
