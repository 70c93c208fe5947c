"""The cache: decoding equals one forward pass whatever is done to the cache between steps."""

import copy

import pytest
import torch
from allocations import Largest
from torch import nn

import quest_core
from quest_core import Attention, Cache

# One attention per kind of state; `check_mechanism` decodes with every mechanism.
KEPT = [
    "quest",
    "quest+gqa(kv_heads=2)",
    "standard+dgqa(kv_heads=2)",
    "elliptical-quest+gqa(kv_heads=2)",
    "aft-full(max_length=40, rank=3)",
]
SUMMED = [
    "linear",
    "aft-simple",
    "aft-local(max_length=40, rank=3, window=1)",
    "aft-local(max_length=40, rank=null, window=4)",
]
CACHES = [{}, {"max_length": 40}]
HOW = [(cache, gradients) for cache in CACHES for gradients in (False, True)]  # options, and whether they are recorded


class Stack(nn.Module):
    """Two layers, of which an elliptical one compares its values with those of the first."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(16, 4, attention) for _ in range(2)])
        quest_core.chain(self)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        self.double().eval()

    def forward(self, x, caches=None, real=None):
        """[B, N, 16] -> the same; real: [B, M], True = no padding."""
        for layer, cache in zip(self.layers, caches or [None, None], strict=True):
            x = x + layer(x, is_causal=True, cache=cache, key_mask=real)
        return x


def steps(model, x, caches, sizes, real=None):
    out = []
    for piece in x.split(sizes, 1):
        seen = None if real is None else real[:, : len(caches[0]) + piece.shape[1]]
        out.append(model(piece, caches, seen))
    return torch.cat(out, 1)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("cache", "gradients"), HOW)
@pytest.mark.parametrize("sizes", [[1] * 13, [5, 1, 1, 6]])
@pytest.mark.parametrize("attention", KEPT + SUMMED)
def test_steps_equal_one_pass(attention, sizes, cache, gradients):
    model = Stack(attention)
    x = torch.randn(3, 13, 16, dtype=torch.float64, requires_grad=gradients)
    real = torch.rand(3, 13) > 0.3
    real[0, :3] = False  # padding on the left: queries that see no key
    for mask in (None, real):
        with torch.set_grad_enabled(gradients):
            outs = steps(model, x, [Cache(**cache), Cache(**cache)], sizes, mask), model(x, real=mask)
        close(*outs)
        if gradients:
            sources = [x, *model.parameters()]
            close(*(torch.autograd.grad(out.square().sum(), sources, allow_unused=True) for out in outs))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("attention", KEPT + SUMMED)
def test_rows_go_their_own_ways(attention, cache):
    model = Stack(attention)
    x = torch.randn(3, 13, 16, dtype=torch.float64)
    real = torch.rand(3, 13) > 0.3
    real[:, 0] = True
    caches = [Cache(**cache), Cache(**cache)]
    with torch.no_grad():
        steps(model, x[:, :6], caches, [4, 1, 1], real)
        for rows in ([2, 2, 0, 1], [3, 1, 1]):  # a batch of 3 grows to 4 and shrinks again
            for cache_ in caches:
                cache_.reorder(torch.tensor(rows))
            x, real = x[rows], real[rows]
        close(steps(model, x[:, 6:], caches, [1, 5, 1], real), model(x, real=real)[:, 6:])


@pytest.mark.parametrize("attention", KEPT + SUMMED)
def test_a_copy_is_independent(attention):
    model = Stack(attention)
    x, y = torch.randn(2, 3, 13, 16, dtype=torch.float64)
    y[:, :6] = x[:, :6]
    caches = [Cache(max_length=20), Cache()]
    with torch.no_grad():
        steps(model, x[:, :6], caches, [4, 1, 1])
        copies = [cache.copy() for cache in caches]
        for i in range(6, 13):
            close(model(x[:, i : i + 1], caches), model(x[:, : i + 1])[:, -1:])
            close(model(y[:, i : i + 1], copies), model(y[:, : i + 1])[:, -1:])


@pytest.mark.parametrize(("cache", "gradients"), HOW)
@pytest.mark.parametrize("attention", KEPT)
def test_truncation_forgets_the_last_tokens(attention, cache, gradients):
    model = Stack(attention)
    x, draft = torch.randn(2, 2, 13, 16, dtype=torch.float64)
    caches = [Cache(**cache), Cache(**cache)]
    with torch.set_grad_enabled(gradients):
        steps(model, x[:, :7], caches, [4, 1, 2])
        model(draft[:, :4], caches)
        for cache_ in caches:
            cache_.crop(7)
        assert len(caches[0]) == 7
        close(steps(model, x[:, 7:], caches, [1, 4, 1]), model(x)[:, 7:])


@pytest.mark.parametrize("attention", SUMMED)
def test_sums_over_all_tokens_cannot_be_truncated(attention):
    model = Stack(attention)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    caches = [Cache(), Cache()]
    with torch.no_grad():
        steps(model, x[:, :7], caches, [4, 3])
        last = caches[1]
        with pytest.raises(quest_core.UnsupportedError, match=r"crop\(3\): attention '.* keeps sums over all 7"):
            last.crop(3)
        last.crop(7)  # nothing to forget
        close(steps(model, x[:, 7:], caches, [1, 1]), model(x)[:, 7:])
        for cache in caches:
            cache.crop(0)
        close(steps(model, x, caches, [4, 1, 4]), model(x))


@pytest.mark.parametrize("attention", KEPT + SUMMED)
def test_reset_serves_another_sequence_in_the_same_memory(attention):
    model = Stack(attention)
    caches = [Cache(max_length=20), Cache(max_length=20)]
    held = []
    with torch.no_grad():
        for batch in (2, 2, 3):
            x = torch.randn(batch, 9, 16, dtype=torch.float64)
            close(steps(model, x, caches, [4, 1, 4]), model(x))
            held.append((caches[1].nbytes, [x.data_ptr() for x in caches[1]._memory.values()]))
            for cache in caches:
                cache.reset()
                assert len(cache) == 0
    assert held[0] == held[1]
    assert held[2][0] * 2 == held[0][0] * 3


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_allocated_once_for_max_length_and_doubles_without():
    q, k, v = torch.randn(3, 2, 2, 100, 8)
    mechanism = quest_core.Mechanism("quest", num_heads=2, head_dim=8)
    fixed, growing = Cache(max_length=100), Cache()
    places, sizes = set(), []
    for i in range(100):
        for cache in (fixed, growing):
            mechanism.decode(*(x[:, :, i : i + 1] for x in (q, k, v)), cache)
        places.add(fixed["k"].data_ptr())
        sizes.append(growing.nbytes)
    assert len(places) == 1
    assert fixed.nbytes == 2 * 4 * 2 * 2 * 100 * 8
    token = 2 * 4 * 2 * 2 * 8
    assert sorted(set(sizes)) == [token * n for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert fixed["k"].shape == growing["k"].shape == (2, 2, 100, 8)
    torch.testing.assert_close(fixed["k"].norm(dim=-1), torch.ones(2, 2, 100))  # quest keeps unit keys
    torch.testing.assert_close(fixed["v"], v)


@pytest.mark.parametrize("attention", SUMMED)
def test_sums_do_not_grow(attention):
    model = Stack(attention)
    sizes = []
    caches = [Cache(), Cache()]
    with torch.no_grad():
        for _ in range(40):
            model(torch.randn(1, 1, 16, dtype=torch.float64), caches)
            sizes.append(caches[1].nbytes)
    assert len(set(sizes[30:])) == 1
    assert sizes[-1] <= 33 * 2 * 16 * 8 if "window" in attention else sizes[0] == sizes[-1]


@pytest.mark.needs_torch("2.6", "a fused kernel for shared heads on a CPU")
def test_a_single_query_builds_no_mask_and_no_copy_of_the_keys():
    for attention in ("quest", "quest+gqa(kv_heads=2)", "quest+mqa"):
        made = quest_core.Mechanism(attention, num_heads=4, head_dim=8)
        heads = quest_core.mechanism.count_kv_heads(attention, 4)
        cache = Cache(max_length=512)
        with torch.no_grad():
            made.decode(torch.randn(1, 4, 500, 8), *torch.randn(2, 1, heads, 500, 8), cache)
            with Largest() as seen:
                made.decode(torch.randn(1, 4, 1, 8), *torch.randn(2, 1, heads, 1, 8), cache)
        assert 0 < seen.elements < 500


# --- gradients ------------------------------------------------------------------------------------------------------


def test_frozen_and_inference_prefixes_can_be_continued():
    model = Stack("quest")
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    want = model(x)[:, 4:]
    for before in (torch.no_grad(), torch.inference_mode()):
        for after in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            caches = [Cache(max_length=9), Cache()]
            with before:
                model(x[:, :4], caches)
            with after:
                out = steps(model, x[:, 4:], caches, [1, 3, 1])
            close(out.clone(), want)
    out.sum().backward()


def test_steps_without_gradients_leave_the_graph_of_earlier_ones_alone():
    model = Stack("quest")
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    caches = [Cache(), Cache()]
    out = model(x[:, :6], caches)
    want = torch.autograd.grad(model(x[:, :6]).sum(), x)[0]
    for cache in caches:
        cache.crop(3)
    with torch.no_grad():
        close(model(x[:, 3:], caches), model(x)[:, 3:])
    close(torch.autograd.grad(out.sum(), x)[0], want)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["quest", "linear", "aft-local"])
def test_more_tokens_than_max_length_are_refused(attention):
    layer = Attention(16, 4, attention).eval()
    cache = Cache(max_length=5)
    layer(torch.randn(2, 4, 16), is_causal=True, cache=cache)
    with pytest.raises(quest_core.InputError, match="4 tokens and 2 new ones make 6, more than its max_length=5"):
        layer(torch.randn(2, 2, 16), is_causal=True, cache=cache)
    layer(torch.randn(2, 1, 16), is_causal=True, cache=cache)
    assert len(cache) == 5


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("attention", KEPT + SUMMED)
def test_a_step_that_raised_can_be_taken_again(attention, first):
    """A hook that raises stands for an interrupt or for too little memory, at the end of the first layer's step."""
    model, caches, x = Stack(attention), [Cache(), Cache()], torch.randn(2, 8, 16, dtype=torch.float64)
    taken = steps(model, x[:, :first], caches, [first]) if first else x[:, :0]
    mechanism = model.layers[0].mechanism

    def stop(*_):
        raise KeyboardInterrupt

    hook = (mechanism.family or mechanism.normalizer).register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x[:, first:], caches)
    hook.remove()
    close(torch.cat([taken, model(x[:, first:], caches)], 1), model(x))


@pytest.mark.parametrize("attention", ["quest", "linear", "aft-local", "elliptical"])
def test_other_tensors_are_refused_by_both_values(attention):
    made = Stack(attention).layers[0].mechanism
    cache = Cache()
    made.decode(*torch.randn(3, 2, 4, 3, 4, dtype=torch.float64), cache)
    for shape, dtype, device, match in (
        ((3, 4, 1, 4), torch.float64, "cpu", "a batch of 2, the new tokens are 3"),
        ((2, 4, 1, 4), torch.float32, "cpu", "type torch.float64, the new tokens are torch.float32"),
        ((2, 4, 1, 4), torch.float64, "meta", "device cpu, the new tokens are meta"),
    ):
        new = torch.randn(3, *shape, dtype=dtype, device=device)
        with pytest.raises(quest_core.InputError, match=match):
            made.decode(*new, cache)
        assert len(cache) == 3


def test_reordering_compiles():
    """Beam search inside a compiled step."""
    cache = Cache()
    cache.append("k", torch.randn(2, 1, 3, 4))
    cache.tokens = 3
    torch.compile(cache.reorder, backend="eager", fullgraph=True)(torch.tensor([1, 1]))
    assert torch.equal(cache["k"][0], cache["k"][1])


def test_wrong_rows_lengths_and_missing_steps_are_refused():
    layer = Attention(16, 4).eval()
    cache = Cache()
    layer(torch.randn(2, 4, 16), is_causal=True, cache=cache)
    with pytest.raises(quest_core.InputError, match="vector of batch indices"):
        cache.reorder(torch.tensor([True, False]))
    for tokens in (-1, 5):
        with pytest.raises(quest_core.InputError, match="the cache holds 4 tokens; choose 0 to 4"):
            cache.crop(tokens)
    with pytest.raises(quest_core.InputError, match="holds 4 tokens that have no 'other'"):
        cache.append("other", torch.randn(2, 4, 1, 4))


@pytest.mark.parametrize("attention", ["quest", "linear", "aft-simple", "aft-local(max_length=40)"])
@pytest.mark.drawn(1)
def test_compiled_steps_equal_eager_ones(attention):
    model = Stack(attention)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        close(steps(compiled, x, [Cache(max_length=20), Cache()], [4] + [1] * 8), model(x))


@pytest.mark.parametrize("attention", ["aft-simple", "aft-local(max_length=2048, rank=3)", "aft-full(max_length=2048)"])
def test_rounding_errors_do_not_add_up(attention):
    """Keys of all sizes, in float32, against one pass in float64."""
    made = quest_core.Mechanism(attention, num_heads=1, head_dim=4).eval()
    q, k, v = torch.randn(3, 1, 1, 1500, 4)
    k = k * 5
    k[:, :, 300] = 80
    k[:, :, 301] = -80
    k[:, :, 900:] -= 70
    cache = Cache()
    with torch.no_grad():
        got = torch.cat([made.decode(*new, cache) for new in zip(*(x.split(1, 2) for x in (q, k, v)), strict=True)], 2)
        want = made.double()(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_cache_belongs_to_one_layer():
    one, two = (quest_core.Attention(16, 2, "quest").eval() for _ in range(2))
    x, cache = torch.randn(1, 5, 16), quest_core.Cache()
    with torch.no_grad():
        one(x, is_causal=True, cache=cache)
        for twin in (cache, cache.copy(), copy.deepcopy(cache)):
            one(x[:, :1], is_causal=True, cache=twin)
        cache.crop(5)
        with pytest.raises(quest_core.InputError, match=r"5 tokens of another layer \(attention 'quest'\); give each"):
            two(x, is_causal=True, cache=cache)
        cache.reset()
        two(x, is_causal=True, cache=cache)


@pytest.mark.parametrize("attention", ["quest", "quest+sigmoid", "linear", "aft-simple"])
def test_a_mask_of_samples_applies_to_every_step(attention):
    made = quest_core.Mechanism(attention, num_heads=2, head_dim=4).eval()
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    mask = torch.tensor([True, False])[:, None, None, None]
    cache = Cache()
    with torch.no_grad():
        parts = zip(*(x.split([3, 1, 2], 2) for x in (q, k, v)), strict=True)
        got = torch.cat([made.decode(*new, cache, attn_mask=mask) for new in parts], 2)
        torch.testing.assert_close(got, made(q, k, v, attn_mask=mask, is_causal=True))
