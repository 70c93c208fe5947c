"""The Attention module: projections, cross-attention, masks and the cache."""

import copy
import functools
import pickle

import pytest
import torch
from models import Around

import quest_core
from quest_core import Attention, Cache
from quest_core.registry import mechanisms

MECHANISMS = [
    *(name for name, part in mechanisms().items() if part.axis == "score" and not part.chained),
    *("quest+gqa(kv_heads=2)", "qknorm+mqa", "quest+dgqa(kv_heads=2)", "quest+sigmoid", "sinkhorn", "linear", "cosine"),
    *("aft-simple", "aft-full(max_length=9)", "aft-local(max_length=9, window=3)", "aft-conv(dims=1, window=3)"),
]


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("attention", MECHANISMS)
def test_is_projections_around_the_mechanism(attention, heads):
    """What mechanisms compute is tested in tests/grid."""
    if heads == 1 and "gqa" in attention:
        return
    x, real = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for context in (None, torch.randn(2, 7, 6)):
        if context is not None and attention.startswith(("aft-local", "aft-conv")):
            continue
        layer = Attention(12, heads, attention, context_dim=None if context is None else 6).eval()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        seen = real if context is None else torch.rand(2, 7) > 0.3
        source = x if context is None else context
        q, k, v = (
            p(y).unflatten(-1, (n, -1)).transpose(1, 2)
            for p, y, n in (
                (layer.q_proj, x, heads), (layer.k_proj, source, layer.kv_heads), (layer.v_proj, source, layer.kv_heads)
            )
        )  # fmt: skip
        mask = layer.mechanism.padding_mask(seen, same_tokens=context is None)
        for causal in (False, True)[: 1 + (context is None and not layer.mechanism._no_causal)]:
            want = layer.mechanism(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)
            got = layer(x, context, key_mask=seen, is_causal=causal)
            torch.testing.assert_close(got, layer.out_proj(want))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attention", MECHANISMS)
def test_multihead_attention_is_too(attention, need_weights):
    layer = quest_core.MultiheadAttention(12, 4, batch_first=True, attention=attention).eval()
    if need_weights and layer.mechanism.family is not None:  # which has none
        return
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 12)
    packed = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    parts = zip(packed.split(layer.head_sizes.widths, -1), (4, layer.kv_heads, layer.kv_heads), strict=True)
    want = layer.mechanism(*(part.unflatten(-1, (n, -1)).transpose(1, 2) for part, n in parts))
    got = layer(x, x, x, need_weights=need_weights)[0]
    torch.testing.assert_close(got, layer.out_proj(want.transpose(1, 2).flatten(2)))


def test_masks_combine():
    layer = Attention(8, 2, "quest").eval()
    x = torch.randn(2, 5, 8)
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    band = torch.ones(5, 5).tril(1).bool()
    additive = torch.zeros(5, 5).masked_fill(~band, -torch.inf)
    want = layer(x, attn_mask=band & real[:, None, None, :])
    torch.testing.assert_close(layer(x, attn_mask=band, key_mask=real), want)
    torch.testing.assert_close(layer(x, attn_mask=additive, key_mask=real), want)


def test_dropout_only_while_training():
    layer = Attention(8, 2, "quest", dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Attention(10, 4, "quest"), "embed_dim is 10, which the 4 heads do not divide"),
        (lambda: Attention(8, 4, "quest", dropout=1.0), "dropout is 1.0"),
        (lambda: Attention(0, 4), "embed_dim is 0; it is a whole number of at least 1"),
        (lambda: Attention(8, 0), "num_heads is 0"),
        (lambda: Attention(8, 4, head_dim=0), "head_dim is 0"),
        (lambda: Attention(8, 4, head_dim=-8), "head_dim is -8"),
        (lambda: Attention(8, 4, head_dim=2.5), "head_dim is 2.5"),
        (lambda: Attention(8, 4, context_dim=0), "context_dim is 0"),
        (lambda: Attention(8, 1, "qknorm-hs(init=200)"), "init is 200, above cap=100"),
        (lambda: quest_core.Cache(max_length=0), "max_length is 0"),
        (lambda: quest_core.Cache(max_length=2.5), "max_length is 2.5; it is a whole number of at least 1"),
        (lambda: quest_core.Cache(max_length="9"), "max_length is '9'"),
    ],
)
def test_sizes_and_options_that_do_not_fit_are_named(build, message):
    with pytest.raises(quest_core.ConfigError, match=message):
        build()


def test_wrong_masks_are_named():
    layer = Attention(8, 2)
    x = torch.randn(2, 5, 8)
    with pytest.raises(quest_core.InputError, match="True where a key may be attended to"):
        layer(x, key_mask=torch.ones(2, 5))
    with pytest.raises(quest_core.InputError, match=r"key_mask is .* \[2, 4\]; it needs .* \[2, 5\]"):
        layer(x, key_mask=torch.ones(2, 4, dtype=torch.bool))
    real = torch.ones(2, 5, dtype=torch.bool)
    for wrong in (torch.ones(2, 5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.long)):
        with pytest.raises(quest_core.InputError, match=r"a mask per sample \[B, N, M\]"):
            layer(x, attn_mask=wrong, key_mask=real)  # merging must not make it look right
    with pytest.raises(quest_core.InputError, match="needs three axes: batch, tokens, features"):
        layer(x[0])
    with pytest.raises(quest_core.InputError, match="a context of 6 features"):
        Attention(8, 2, context_dim=6)(x)
    with pytest.raises(quest_core.InputError, match="a mask of padding is torch.int64"):
        layer.mechanism.padding_mask(real.long(), same_tokens=True)
    cache = Cache()
    layer(x, is_causal=True, cache=cache)
    with pytest.raises(quest_core.InputError, match="say is_causal=True"):
        layer(x, cache=cache)
    with pytest.raises(quest_core.InputError, match="cache holds the keys of x itself"):
        layer(x, x, is_causal=True, cache=cache)


@pytest.mark.parametrize("spec", ["quest", "standard"])
def test_a_second_derivative_is_refused_by_name_beside_hooks_of_the_caller(spec):
    made = quest_core.Mechanism(spec, num_heads=2, head_dim=4)
    seen = []
    for mechanism in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        q, k, v = torch.randn(3, 1, 2, 5, 4).requires_grad_()
        for call in "first", "second":
            out = mechanism(q, k, v)
            out.register_hook(lambda grad, call=call: seen.append(call))
            torch.autograd.grad(out.sum(), v, retain_graph=True)
            with pytest.raises(quest_core.UnsupportedError, match=f"attention '{spec}': a second derivative"):
                torch.autograd.grad(out.sum(), v, create_graph=True)
    assert seen == ["first", "second"] * 3  # each output has only its own


@pytest.mark.parametrize(("batch", "tokens"), [(0, 6), (2, 0), (0, 0)])
def test_nothing_gives_nothing(batch, tokens):
    """An empty batch and no tokens, as stock PyTorch does; tests/grid draws them for mechanisms."""
    x = torch.randn(batch, tokens, 32)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for name in ("standard", "quest", "quest+sigmoid", "quest+sinkhorn", "qknorm", "linear"):
        assert Attention(32, 4, name)(x).shape == x.shape
        for training in (False, True):
            module = quest_core.MultiheadAttention(32, 4, batch_first=True, attention=name).train(training)
            out, weights = module(x, x, x, need_weights=name != "linear")
            assert out.shape == x.shape
            assert weights is None or weights.shape == (batch, tokens, tokens)
    for name in ("standard", "quest", "quest+sigmoid"):
        assert Attention(32, 4, name)(x, attn_mask=mask, is_causal=True).shape == x.shape
        tokens_first = x.transpose(0, 1)
        module = quest_core.MultiheadAttention(32, 4, attention=name)
        assert module(tokens_first, tokens_first, tokens_first, attn_mask=~mask)[0].shape == tokens_first.shape


@pytest.mark.parametrize("shape", [(0, 6, 32), (2, 0, 32)])
def test_nothing_through_a_host_that_calls_scaled_dot_product_attention(shape):
    model = Around(functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True), 32, heads=4)
    quest_core.inject(model, "quest", example=torch.randn(2, 6, 32))
    assert model(torch.randn(shape)).shape == (shape[0], 4, shape[1], 8)


def test_a_context_that_is_the_input_is_self_attention():
    x, key_mask = torch.randn(2, 6, 16), torch.arange(6) < torch.tensor([[3], [6]])
    layer = quest_core.Attention(16, 2, "sinkhorn").eval()
    assert torch.equal(layer(x, x, key_mask=key_mask), layer(x, key_mask=key_mask))
