"""Packed attention against a loop over single sequences."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quest_core
from quest_core import PackingPlan, attention_packed
from quest_core.errors import ConfigError, InputError
from quest_core.tools import packing

HEADS, DIM = 4, 8


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tokens(lengths, groups=HEADS, seed=0, key_dim=DIM):
    """q [T, H, D], k and v [T, G, D], float64, requiring gradients; k and v are slices of one packed tensor."""
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lengths), HEADS, DIM, generator=made, dtype=torch.float64)
    kv = torch.randn(sum(lengths), 2, groups, DIM, generator=made, dtype=torch.float64)
    return [x.detach().requires_grad_() for x in (q, kv[:, 0, :, :key_dim], kv[:, 1])]


def loop(q, k, v, mechanism, lengths, **options):
    outs = [torch.zeros_like(q[:0])]
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        if len(parts[0]):
            outs.append(mechanism(*(x[None].transpose(1, 2) for x in parts), **options)[0].transpose(0, 1))
    return torch.cat(outs)


def check(spec, lengths, *, groups=HEADS, is_causal=False):
    mechanism = quest_core.Mechanism(spec, num_heads=HEADS, head_dim=DIM).double() if isinstance(spec, str) else spec
    key_dim = quest_core.mechanism.head_sizes(mechanism.config, HEADS, DIM).key_dim
    q, k, v = tokens(lengths, groups, key_dim=key_dim)
    out = attention_packed(q, k, v, mechanism, cu_seqlens=cumulative(lengths), is_causal=is_causal)
    want = loop(q, k, v, mechanism, lengths, is_causal=is_causal)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    if out.numel():
        seed = torch.randn(out.shape, dtype=out.dtype)
        got = torch.autograd.grad(out, (q, k, v), seed)
        expected = torch.autograd.grad(want, (q, k, v), seed, materialize_grads=True)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


# Zeros, many of one length, a few long ones: what graphs and point clouds bring.
LENGTHS = st.lists(
    st.one_of(st.sampled_from([0, 1, 7]), st.integers(0, 20), st.integers(60, 90)), min_size=0, max_size=7
)


@pytest.mark.parametrize("kind", ["self", "causal", "gqa"])
@given(lengths=LENGTHS)
def test_equals_a_loop(kind, lengths):
    spec, groups = ("quest+gqa(kv_heads=2)", 2) if kind == "gqa" else ("quest", HEADS)
    check(spec, lengths, groups=groups, is_causal=kind == "causal")


MIXED = [5, 0, 81, 5, 17, 64, 1, 12]


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("score", ["elliptical", "elliptical-quest"])
def test_a_chain_of_elliptical_layers_equals_a_loop(score, is_causal):
    """Each sequence's own values say which features count, padding says nothing."""
    layers = [quest_core.Mechanism(score, num_heads=HEADS, head_dim=DIM).double() for _ in range(2)]
    quest_core.chain(torch.nn.ModuleList(layers))
    first, second = (tokens(MIXED, seed=seed) for seed in (0, 1))
    cu = cumulative(MIXED)
    attention_packed(*first, layers[0], cu_seqlens=cu, is_causal=is_causal)
    got = attention_packed(*second, layers[1], cu_seqlens=cu, is_causal=is_causal)

    def chained(q, k, v, **options):
        start = next(places)
        layers[0](*(x[start : start + q.shape[2]][None].transpose(1, 2) for x in first), **options)
        return layers[1](q, k, v, **options)

    places = iter([sum(MIXED[:b]) for b, length in enumerate(MIXED) if length])
    want = loop(*second, chained, MIXED, is_causal=is_causal)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    unchained = loop(*second, layers[0], MIXED, is_causal=is_causal)
    assert not torch.allclose(got, unchained), "the second layer looks at the first one's values"
    seed = torch.randn_like(got)
    gradients = (torch.autograd.grad(out, second, seed) for out in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_pgqa_takes_its_noise_from_each_sequence_alone(monkeypatch):
    """With a constant in place of random numbers the noise is its mean and deviation, which padding must not move."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    check("quest+pgqa(kv_heads=2)", MIXED, groups=2)


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ([2000, *[50] * 31, 0], [(1, 2000, False), (31, 50, False)]),
        ([500, *range(2, 30)], [(1, 500, False), (28, 29, True)]),  # within the padding that a long one leaves
        ([7] * 5, [(5, 7, False)]),
    ],
)
def test_lengths_that_share_a_bucket_are_padded_and_others_are_not(lengths, buckets):
    layout = PackingPlan(cumulative(lengths)).layout(packing.WASTE, torch.device("cpu"))
    found = [(*tokens.shape, real is not None) for tokens, real in zip(layout.tokens, layout.real, strict=True)]
    assert found == buckets


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_padded_area_is_bounded(lengths):
    buckets = PackingPlan(cumulative(lengths)).layout(packing.WASTE, torch.device("cpu")).tokens
    assert sum(map(len, buckets)) == len(lengths)
    padded, real = sum(tokens.numel() * tokens.shape[1] for tokens in buckets), sum(n * n for n in lengths)
    assert padded <= packing.WASTE * real


def test_a_plan_is_made_once_and_reused(monkeypatch):
    made = []
    original = packing._choose_buckets
    monkeypatch.setattr(packing, "_choose_buckets", lambda *a: made.append(a) or original(*a))
    plan = PackingPlan(cumulative(MIXED))
    q, k, v = tokens(MIXED)
    out = q
    for _ in range(12):
        out = attention_packed(out, k, v, "quest", cu_seqlens=plan)
    assert len(made) == 1
    want = q
    for _ in range(12):
        want = loop(want, k, v, quest_core.Mechanism("quest", num_heads=HEADS, head_dim=DIM), MIXED)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-11)


def test_a_plan_that_an_evaluation_used_first_trains():
    plan = PackingPlan(cumulative(MIXED))
    q, k, v = tokens(MIXED)
    with torch.inference_mode():
        attention_packed(q, k, v, cu_seqlens=plan)
    attention_packed(q, k, v, cu_seqlens=plan).sum().backward()
    assert q.grad.isfinite().all()


def test_padding_of_one_sequence_cannot_hurt_another():
    """NaN in one sequence stays there, though rows of a bucket share a batch."""
    q, k, v = (x.detach() for x in tokens([20, 30, 25]))
    k[20:50] = torch.nan
    out = attention_packed(q, k, v, "quest", cu_seqlens=cumulative([20, 30, 25]))
    assert out[20:50].isnan().all()
    assert out[:20].isfinite().all()
    assert out[50:].isfinite().all()


def test_dropout_acts_on_weights():
    q, k, v = (x.detach() for x in tokens([40, 30]))
    cu = cumulative([40, 30])
    torch.manual_seed(1)
    first = attention_packed(q, k, v, "quest", cu_seqlens=cu, dropout_p=0.5)
    torch.manual_seed(1)
    again = attention_packed(q, k, v, "quest", cu_seqlens=cu, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.allclose(first, attention_packed(q, k, v, "quest", cu_seqlens=cu))


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("spec", ["quest", "quest(scale=2)+gqa(kv_heads=2)", "qknorm", "standard"])
def test_the_variable_length_kernel_gets_what_it_needs(spec, is_causal, monkeypatch):
    """No CUDA here: a stand-in with the kernel's signature checks the contract and computes the plain formula."""
    seen = {}

    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options):
        seen.update(options)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (max_q, max_k) == (81, 81)
        for x in (query, key, value):
            assert x.stride(2) == 1
            assert all(step % 8 == 0 for step in x.stride()[:2])
        assert options["window_size"] == ((-1, 0) if is_causal else (-1, -1))
        standard = quest_core.Mechanism(
            f"standard(scale={options['scale']})" + ("+gqa(kv_heads=2)" if options.get("enable_gqa") else ""),
            num_heads=HEADS,
            head_dim=DIM,
        )
        return loop(query, key, value, standard, MIXED, is_causal=is_causal)

    monkeypatch.setattr(packing, "_varlen_attn", lambda shared: varlen_attn)
    monkeypatch.setattr(packing, "varlen_computes", lambda *_: True)
    mechanism = quest_core.Mechanism(spec, num_heads=HEADS, head_dim=DIM).double()
    check(mechanism, MIXED, groups=2 if "gqa" in spec else HEADS, is_causal=is_causal)
    assert seen


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "runs"),
    [
        ("cuda", (7, 5), torch.float16, False),  # T4
        ("cuda", (8, 0), torch.bfloat16, True),  # A100
        ("cuda", (9, 0), torch.float32, False),
        ("cpu", (9, 0), torch.bfloat16, False),
    ],
)
def test_flash_kernels_run_from_ampere_on(device, capability, dtype, runs, monkeypatch):
    """Other tensors and earlier GPUs take padded batches."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(packing, "_varlen_attn", lambda shared: lambda *_, **__: None)
    assert packing.flash_runs(torch.device(device), dtype) is runs
    mechanism = quest_core.Mechanism("quest", num_heads=HEADS, head_dim=DIM)
    assert packing.varlen_computes(mechanism, torch.device(device), dtype, DIM, shared=False) is runs


def test_pytorchs_own_varlen_attn_is_recognized():
    """Where this PyTorch has one; its parameters decide whether it is used."""
    found = packing._varlen_attn(shared=True)
    assert found is None or {"cu_seq_q", "max_q"} <= inspect.signature(found).parameters.keys()


def test_a_stateless_mechanism_may_be_named_or_mapped():
    q, k, v = tokens([3, 4])
    cu = cumulative([3, 4])
    named = attention_packed(q, k, v, "qnorm", cu_seqlens=cu)
    assert torch.equal(named, attention_packed(q, k, v, {"name": "qnorm"}, cu_seqlens=cu))
    with pytest.raises(ConfigError, match="learnable"):
        attention_packed(q, k, v, "qknorm", cu_seqlens=cu)


def test_errors_name_what_does_not_fit():
    q, k, v = tokens([3, 4])
    cu = cumulative([3, 4])
    with pytest.raises(InputError, match="three axes"):
        attention_packed(q[None], k, v, cu_seqlens=cu)
    with pytest.raises(InputError, match="7 tokens, but its sequences end at 8"):
        attention_packed(q, k, v, cu_seqlens=cumulative([3, 5]))
    with pytest.raises(InputError, match="int32 of shape"):
        attention_packed(q, k, v, cu_seqlens=cu.float())
    with pytest.raises(InputError, match="cu_seqlens is a list; it needs a tensor"):
        attention_packed(q, k, v, cu_seqlens=[0, 7])
    with pytest.raises(InputError, match="max_seqlen is 2, and the longest sequence has 4 tokens"):
        attention_packed(q, k, v, cu_seqlens=PackingPlan(cu, max_seqlen=2))
    for starts in ([0, 5, 3, 7], [1, 7]):
        with pytest.raises(InputError, match="must start at 0 and not decrease"):
            attention_packed(q, k, v, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(InputError, match=r"\(7, 4\), \(6, 4\) and \(7, 4\); expected as many tokens"):
        attention_packed(q, k[1:], v, cu_seqlens=cu)
    with pytest.raises(InputError, match="grouping"):
        attention_packed(q, k[:, :2], v[:, :2], "quest", cu_seqlens=cu)


def test_derivatives_of_every_kind_equal_those_of_a_loop():
    """A batch of other lengths is moved otherwise, so what works must not depend on the lengths."""
    lengths = [5, 0, 81, 12]
    q, k, v = (x.detach() for x in tokens(lengths))
    cu, made = cumulative(lengths), quest_core.Mechanism("quest+sigmoid", num_heads=HEADS, head_dim=DIM)

    def packed(x):
        return attention_packed(q + x, k, v * x, made, cu_seqlens=cu).square().sum()

    def looped(x):
        return loop(q + x, k, v * x, made, lengths).square().sum()

    def penalty(f):
        x = torch.ones((), dtype=q.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(slope.square(), x)[0]

    one = torch.ones((), dtype=q.dtype)
    for take in (
        penalty,
        lambda f: torch.func.grad(f)(one),
        lambda f: torch.func.jvp(f, (one,), (one,))[1],
        lambda f: torch.func.hessian(f)(one),
        lambda f: torch.func.vmap(f)(torch.stack([one, 2 * one])),
    ):
        torch.testing.assert_close(take(packed), take(looped))


@pytest.mark.parametrize(
    ("spec", "lengths"), [("aft-conv(dims=1, window=3)", MIXED), ("aft-conv(window=3)", [9, 4, 0, 16, 4])]
)
def test_sequences_of_other_lengths_are_no_part_of_a_grid(spec, lengths):
    """Padding would change what a grid is, so no batch is padded."""
    made = quest_core.Mechanism(spec, num_heads=HEADS, head_dim=DIM).double()
    with torch.no_grad():
        made.family.gain.fill_(0.7)
    check(made, lengths)
