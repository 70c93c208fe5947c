"""The attention-free kernels against the float64 reference, under Triton's interpreter, for CI has no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import test_aft as plain
import torch

import quest_core
from quest_core.kernels.aft import aft_applies, aft_biased, aft_simple, tokens_first
from quest_core.mechanisms import aft_ops

if importlib.util.find_spec("triton") is not None:
    # Triton decides whether to interpret when it is first imported: here, before any test runs.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from quest_core.kernels import aft_triton

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; it is part of the extra 'test' on Linux",
)

SEQUENCE = plain.SEQUENCE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton kernels, interpreted, for CPU tensors, in tiles of 16; the operators that ran."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("QUEST_KERNELS", "fused")
    monkeypatch.setattr(aft_triton, "BLOCK", 16)
    ran: list[str] = []
    for name in ("aft_simple", "aft_biased"):
        real = getattr(aft_triton, name)

        def spy(*arguments: Any, _real: Any = real, _name: str = name) -> Any:
            ran.append(_name)
            return _real(*arguments)

        monkeypatch.setattr(aft_triton, name, spy)
    yield ran
    assert ran, "no kernel ran"
    torch._dynamo.reset()


# Deviation of keys and of biases: one product a tile, some of both, element by element.
LOUD = {
    "quiet": (1.0, 1.0),
    "biases spread": (1.0, 200.0),
    "some tiles spread": (12.0, 3.0),
    "all spread": (200.0, 80.0),
}


@pytest.mark.parametrize("loud", LOUD)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("spec", SEQUENCE)
def test_outputs_and_gradients_equal_the_reference(spec: str, is_causal: bool, loud: str, calls: list[str]) -> None:
    """Several tiles each way, the last of them cut; another number of queries than of keys where it means something."""
    keys, biases = LOUD[loud]
    n, m = (37, 37) if "local" in spec and not is_causal else (21, 37)
    batch, dim = (2, 9) if loud == "quiet" else (1, 2)  # key by key takes its time under the interpreter
    made = plain.build(spec, 2, dim, spread=biases).float()
    q, k, v = (x.float() for x in plain.tensors(spec, batch, 2, n, m, dim))
    leaves = [q.requires_grad_(), (k * keys).requires_grad_(), v.requires_grad_()]
    mask = plain.key_mask("boolean" if loud == "quiet" else "additive", batch, m, 0)
    assert mask is not None
    mask = mask if mask.dtype == torch.bool else mask.float()
    out = made(*leaves, attn_mask=mask, is_causal=is_causal)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, [*leaves, *made.parameters()], grad)

    exact = plain.build(spec, 2, dim, spread=biases)
    exact.load_state_dict(made.state_dict())
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = plain.truth(exact, *wide, mask=mask, is_causal=is_causal)
    want = torch.autograd.grad(truth, [*wide, *exact.parameters()], grad.double())
    # Rounding a logit of several hundred changes its weight by its last place.
    tolerance = {"quiet": 1e-5, "biases spread": 1e-3, "some tiles spread": 1e-4, "all spread": 1e-3}[loud]
    for a, b in zip([out, *got], [truth, *want], strict=True):
        assert (a.double() - b).norm() <= tolerance * (b.norm() + 1e-3 * grad.norm())  # one key may take it all


def test_spread_tiles_are_added_key_by_key_and_others_are_not(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways through a tile are one average: forced on the same numbers they agree, and the limit decides."""
    k, v, left, right = (torch.randn(shape) for shape in ((1, 20, 3), (1, 20, 3), (20, 3), (20, 3)))
    results = []
    for limit in (60.0, -1.0, 3.0):
        monkeypatch.setattr(aft_triton, "LIMIT", limit)
        leaves = [x.clone().requires_grad_() for x in (k, v, left, right)]
        out = aft_biased(*leaves[:3], leaves[3], True, 5)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize(("n", "m", "is_causal"), [(50, 50, False), (50, 50, True), (3, 50, True)])
@pytest.mark.usefixtures("calls")
def test_near_and_far_cover_every_pair_once(n: int, m: int, is_causal: bool, window: int) -> None:
    """With keys and biases of 0 and values of 1 the normaliser counts the keys that were summed."""
    ones = torch.ones(1, m, 1)
    _, lse = aft_triton.aft_biased(ones * 0, ones, torch.zeros(n, 1), torch.zeros(m, 1), is_causal, window)
    want = torch.arange(1, n + 1) + m - n if is_causal else torch.full((n,), m)
    torch.testing.assert_close(lse[0, :, 0].exp(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("spec", SEQUENCE)
@pytest.mark.usefixtures("calls")
def test_error_is_at_most_twice_that_of_plain_arithmetic(spec: str, is_causal: bool, dtype: torch.dtype) -> None:
    plain.test_error_is_at_most_twice_that_of_plain_arithmetic(spec, dtype, is_causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SEQUENCE)
@pytest.mark.usefixtures("calls")
def test_a_huge_future_key_changes_nothing_in_the_past(spec: str, dtype: torch.dtype) -> None:
    plain.test_a_huge_future_key_changes_nothing_in_the_past(spec, dtype)


@pytest.mark.parametrize("spec", SEQUENCE)
@pytest.mark.usefixtures("calls")
def test_a_sample_without_visible_keys_gives_zeros_and_finite_gradients(spec: str) -> None:
    plain.test_a_sample_without_visible_keys_gives_zeros_and_finite_gradients(spec, torch.bfloat16)


@pytest.mark.usefixtures("calls")
def test_keys_and_biases_of_eighty_mixed() -> None:
    plain.test_keys_and_biases_of_eighty_mixed("aft-local(rank=null)", torch.float32)


@pytest.mark.parametrize("spec", SEQUENCE)
@pytest.mark.usefixtures("calls")
def test_compiles_without_a_graph_break_and_exports(spec: str) -> None:
    plain.test_compiles_without_a_graph_break_and_exports(spec)


@pytest.mark.parametrize("spec", ["aft-simple", "aft-full"])
def test_exports_as_one_operator(spec: str, calls: list[str]) -> None:
    made = plain.build(spec, 2, 4).float()
    q, k, v = (x.float() for x in plain.tensors(spec, 2, 2, 9, 9, 4))
    exported = torch.export.export(made, (q, k, v))
    operators = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {"aft-simple": "quest_core.aft_simple.default", "aft-full": "quest_core.aft_biased.default"}[
        spec
    ] in operators


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("table", [False, True])
def test_operators_keep_pytorchs_rules(window: int, table: bool, calls: list[str]) -> None:
    k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(2))
    left, right = (torch.randn(6, 2, requires_grad=True) for _ in range(2))
    bias = (torch.randn(6, 6, requires_grad=True), None) if table else (left, right)
    torch.library.opcheck(torch.ops.quest_core.aft_biased.default, (k, v, *bias, True, window))
    torch.library.opcheck(torch.ops.quest_core.aft_simple.default, (k, v, table))
    calls.append("operators")


def test_inputs_of_any_layout(calls: list[str]) -> None:
    """Features first in memory, slices of packed tensors and an expanded batch."""
    base = torch.randn(2, 18, 20).mT  # [B, T, C], features apart
    packed = torch.randn(2, 20, 3, 18)[:, :, 1]
    shared = torch.randn(1, 20, 18).expand(2, 20, 18)
    for k, v in ((base, packed), (packed, shared), (shared, base)):
        same = [x.contiguous() for x in (k, v)]
        torch.testing.assert_close(aft_simple(k, v, False), aft_simple(*same, False))
        left, right = torch.randn(3, 20).T, torch.randn(20, 6)[:, ::2]
        want = aft_biased(*same, left.contiguous(), right.contiguous(), False, 0)
        torch.testing.assert_close(aft_biased(k, v, left, right, False, 0), want)


def test_equals_the_eager_path(calls: list[str]) -> None:
    _, k, v = (x.float() for x in plain.tensors("aft-simple", 3, 2, 40, 40, 5))
    rows = [tokens_first(x).transpose(0, 1).flatten(1) for x in (k, v)]
    want = aft_ops.aft_running(*rows)[0].unflatten(1, (3, -1)).transpose(0, 1)
    torch.testing.assert_close(aft_simple(tokens_first(k), tokens_first(v), True), want)


def test_when_they_apply(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    k = torch.randn(1, 2, 5, 4)
    assert aft_applies(k, k)
    assert aft_applies(k.bfloat16(), k, 256)
    assert not aft_applies(k.double(), k.double())
    assert not aft_applies(k, k, 257)
    assert not aft_applies(k[:, :, :0], k[:, :, :0])
    for chosen in ("auto", "eager", "reference"):  # on a CPU `auto` stays eager
        monkeypatch.setenv("QUEST_KERNELS", chosen)
        assert not aft_applies(k, k)
    calls.append("nothing to run")


def test_a_rank_that_no_tile_holds_takes_the_eager_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("QUEST_KERNELS", "fused")
    monkeypatch.setattr(aft_triton, "aft_biased", None)
    made = quest_core.mechanism("aft-full(max_length=8, rank=300)", num_heads=2, head_dim=3)
    q, k, v = torch.randn(3, 1, 2, 8, 3)
    assert made(q, k, v).isfinite().all()
