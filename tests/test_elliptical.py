"""Elliptical scores: the metric against its formula, the chain of layers, causality and decoding."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import torch
from torch import nn

import quest_core


def pair(name="elliptical"):
    layers = [quest_core.Mechanism(name, num_heads=4, head_dim=6) for _ in range(2)]
    quest_core.chain(nn.ModuleList(layers))
    return layers


def tensors(batch, tokens):
    """q, k and v [B, H, N, D]."""
    return torch.randn(3, batch, 4, tokens, 6, dtype=torch.float64)


def formula(q, k, v, before):
    """The second layer of a chain, without a mask; tests/grid has masks."""
    change = (v - before).abs().mean(2, keepdim=True)
    metric = change / change.amax(-1, keepdim=True)  # [B, H, 1, D]
    return ((q * metric) @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def test_the_second_layer_equals_the_formula():
    first, second = pair()
    one, two = tensors(2, 5), tensors(2, 5)
    torch.testing.assert_close(first(*one), quest_core.attention(*one, "standard"))
    torch.testing.assert_close(second(*two), formula(*two, one[2]))


@pytest.mark.parametrize("name", ["elliptical", "elliptical-quest"])
def test_equal_values_make_the_metric_one(name):
    first, second = pair(name)
    q, k, v = tensors(1, 5)
    torch.testing.assert_close(first(q, k, v), second(q, k, v))


def test_layers_of_other_shapes_start_anew():
    """At the border of two stages there is nothing to compare with."""
    first, second = pair()
    first(*tensors(1, 5))
    q, k, v = tensors(1, 7)
    torch.testing.assert_close(second(q, k, v), quest_core.attention(q, k, v, "standard"))


def test_tokens_in_another_order_are_compared_with_themselves():
    """A host may sort its tokens in every layer, cut them into rows, and let a row borrow from another."""
    torch.manual_seed(0)
    first, second = pair()
    q, k, before = tensors(1, 6)  # [1, H, 6, D]
    own = tensors(1, 6)[2]
    take = torch.tensor([[4, 0, 2, 5], [3, 1, 5, 2]])  # two rows of four tokens; 5 and 2 are borrowed
    give = torch.tensor([1, 5, 2, 4, 0, 3])  # the place from which each token is read

    def rows(x):
        return x[0][:, take].transpose(0, 1)  # [2, H, 4, D]

    quest_core.Mechanism("elliptical", num_heads=4, head_dim=4).score.follow(second.score)
    first(q, k, before)
    expected_before = rows(before)
    with second.score.token_order(
        to_tokens=lambda v: v.transpose(1, 2).flatten(0, 1)[give].transpose(0, 1)[None], from_tokens=rows
    ):
        got = second(rows(q), rows(k), rows(own))
    torch.testing.assert_close(got, formula(rows(q), rows(k), rows(own), expected_before))
    # What the second layer hands on lies token by token again.
    (kept,) = second.score._values.values()
    torch.testing.assert_close(kept, own)


def test_stages_end_where_a_mapping_of_stacks_says():
    layers = nn.ModuleList([quest_core.Mechanism("elliptical", num_heads=4, head_dim=6) for _ in range(4)])
    quest_core.chain(layers, {"0": "a", "1": "a", "2": "b", "3": "b"})
    assert [layer.score._previous[0] is not None for layer in layers] == [False, True, False, True]


def test_a_chain_that_is_made_anew_forgets_the_old_one():
    layers = nn.ModuleList([quest_core.Mechanism("elliptical", num_heads=1, head_dim=4) for _ in range(3)])
    quest_core.chain(layers)
    first, second, last = layers
    quest_core.chain(nn.ModuleList([first, last]))
    x = torch.randn(1, 1, 5, 4)
    last(x, x, first(x, x, x))
    assert not last.score._values
    assert second.score._next == ()


def test_values_of_another_width_are_an_error():
    layer = quest_core.Mechanism("elliptical", num_heads=2, head_dim=4)
    layer.score.follow(None)
    with pytest.raises(quest_core.UnsupportedError, match="values of 4 features, found 3"):
        layer(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 3))


def test_an_unlinked_layer_refuses_to_run():
    lonely = quest_core.Mechanism("elliptical", num_heads=4, head_dim=6)
    with pytest.raises(quest_core.UnsupportedError, match=r"quest_core.inject, or call quest_core.chain\(model\)"):
        lonely(*tensors(1, 5))
    with pytest.raises(quest_core.ConfigError, match="'elliptical' has a state"):
        quest_core.attention(*tensors(1, 5), "elliptical")


def encoder(name, layers=3):
    torch.manual_seed(0)
    model = models.encoder(layers=layers)
    for i, parameter in enumerate(model.parameters()):  # layers that differ
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    return quest_core.inject(model, name)[0]


def test_injected_layers_follow_each_other():
    x = torch.randn(2, 5, 16)
    elliptical, plain = encoder("elliptical").eval(), encoder("standard").eval()
    assert not torch.allclose(elliptical(x), plain(x))
    torch.testing.assert_close(elliptical(x), elliptical(x))  # nothing is left over from the pass before
    with pytest.raises(quest_core.InjectionError, match="no layer follows another: layers.0.self_attn"):
        encoder("elliptical", 1)


def test_a_skipped_predecessor_is_an_error_and_never_standard_attention():
    first, second = pair()
    one, two = tensors(1, 5), tensors(1, 5)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        second(*two)
    first(*one)
    second(*two)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        second(*two)  # the values of a pass are handed over once
    first(*one)
    with pytest.raises(quest_core.UnsupportedError, match="only this one was copied"):
        copy.deepcopy(second)(*two)


def test_threads_do_not_see_each_others_values():
    model = encoder("elliptical").eval()
    inputs = [torch.randn(2, 5, 16) for _ in range(16)]
    with torch.no_grad():
        want = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(torch.no_grad()(model), inputs))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("near", [1, 1e-2])
@pytest.mark.parametrize(("reentrant", "training"), [(False, True), (True, True), (False, False)])
def test_only_the_latest_forward_pass_is_recomputed(reentrant, training, near):
    inputs, model = torch.randn(2, 2, 5, 16), encoder("elliptical").train(training)
    inputs[1] = inputs[0] + near * inputs[1]

    def run(x, recompute=True):
        x = x.clone().requires_grad_()
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        return x

    early, late = (run(x) for x in inputs)
    with pytest.raises(quest_core.UnsupportedError, match="the values of its forward pass are gone"):
        early.square().sum().backward()
    late.square().sum().backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    run(inputs[1], False).square().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_kept_after_the_backward_pass(recompute):
    model, x = encoder("elliptical"), torch.randn(2, 5, 16, requires_grad=True)
    out = x
    for layer in model.layers:
        out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=False) if recompute else layer(out)
    loss = out.square().sum()
    scores = [layer.self_attn.mechanism.score for layer in model.layers]
    assert [len(score._step) for score in scores] == [0, 2, 2]
    loss.backward()
    assert not any(score._step or score._values for score in scores)


def test_copies_keep_their_own_chain():
    x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    model = encoder("elliptical-quest")
    want = model.eval()(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(other)
        torch.testing.assert_close(twin(x), want)
    model.train()
    model(x)
    pickle.dumps(model)  # with values of a training step still held
    copy.deepcopy(model)


@pytest.mark.parametrize("size", [1.0, math.nan], ids=["finite", "overflowed"])
def test_activation_checkpointing_works_where_another_thread_runs_backward(size):
    """As on a GPU, whose backward pass has a thread of its own; and in a step whose values are NaN."""
    model = encoder("elliptical")
    out = size * torch.randn(2, 5, 16)
    for layer in model.layers:
        out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result()
    assert all(p.grad is not None for p in model.parameters())


def test_values_of_a_pass_that_ended_early_are_not_taken():
    layers = nn.ModuleList(quest_core.Attention(16, 2, "elliptical") for _ in range(3))
    quest_core.chain(layers)
    x = torch.randn(1, 5, 16)
    layers[1](layers[0](x))  # leaves the values of layer 1
    layers[0](x)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        layers[2](x)


@pytest.mark.parametrize(
    ("layer", "connect"),
    [
        (lambda: quest_core.Attention(16, 2, "elliptical"), quest_core.chain),
        (lambda: nn.TransformerEncoderLayer(16, 2), lambda model: quest_core.inject(model, "elliptical")),
    ],
)
def test_a_layer_of_two_places_is_refused(layer, connect):
    model = nn.ModuleList([layer(), layer()] * 2)
    said = r"'0.*' and '2.*' are one layer, which would have"
    with models.unchanged(model), pytest.raises(quest_core.UnsupportedError, match=said):
        connect(model)
