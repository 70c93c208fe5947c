"""Elliptical scores: the metric against its formula, the chain of layers, causality and decoding."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import quest_core
from quest_core.mechanisms.naive import softmax, unit, visible

NAMES = ("elliptical", "elliptical-quest")


def pair(name: str, heads: int = 4, kv: int = 4, dim: int = 6) -> tuple[quest_core.Mechanism, quest_core.Mechanism]:
    spec = name if kv == heads else f"{name}+gqa(kv_heads={kv})"
    first, second = (quest_core.Mechanism(spec, num_heads=heads, head_dim=dim) for _ in range(2))
    quest_core.chain(nn.ModuleList([first, second]))
    return first, second


def tensors(batch: int, heads: int, kv: int, n: int, dim: int = 6, m: int | None = None) -> tuple[Tensor, ...]:
    m = n if m is None else m
    made = torch.randn(batch, heads, n, dim), torch.randn(batch, kv, m, dim), torch.randn(batch, kv, m, dim)
    return tuple(x.double() for x in made)


def formula(name: str, q: Tensor, k: Tensor, v: Tensor, before: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The specification, token by token, for N = M."""
    batch, heads, n, dim = q.shape
    share = heads // k.shape[1]
    k, v, before = (x.repeat_interleave(share, 1) for x in (k, v, before))
    seen = visible(n, n, mask, is_causal).expand(batch, heads, n, n)
    metric = torch.ones(batch, heads, n, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                tokens = [j for j in range(n) if seen[b, h, i, j]]
                if tokens:
                    mean = torch.stack([(v[b, h, j] - before[b, h, j]).abs() for j in tokens]).mean(0)
                    if mean.max() > 0:
                        metric[b, h, i] = mean / mean.max()
    logits = (q * metric) @ (unit(k).mT if name == "elliptical-quest" else k.mT / math.sqrt(dim))
    return softmax(logits, seen) @ v


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_second_layer_equals_the_formula(name: str, kv: int, masked: bool, is_causal: bool) -> None:
    torch.manual_seed(0)
    first, second = pair(name, kv=kv)
    mask = None
    if masked:
        mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
        mask[0, ..., 3:] = False
    one, two = tensors(2, 4, kv, 5), tensors(2, 4, kv, 5)
    plain = {"elliptical": "standard", "elliptical-quest": "quest"}[name]
    want_first = quest_core.attention(*one, plain + ("+gqa" if kv != 4 else ""), attn_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(first(*one, attn_mask=mask, is_causal=is_causal), want_first)
    want = formula(name, *two, one[2], mask, is_causal)
    torch.testing.assert_close(second(*two, attn_mask=mask, is_causal=is_causal), want, rtol=1e-10, atol=1e-10)
    first(*one)
    weights = second.forward_with_weights(*two, attn_mask=mask, is_causal=is_causal)[0]
    torch.testing.assert_close(weights, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_equal_values_make_the_metric_one(name: str) -> None:
    first, second = pair(name)
    q, k, v = tensors(1, 4, 4, 5)
    torch.testing.assert_close(first(q, k, v), second(q, k, v))


def test_layers_of_other_shapes_start_anew() -> None:
    """At the border of two stages there is nothing to compare with."""
    first, second = pair("elliptical")
    first(*tensors(1, 4, 4, 5))
    q, k, v = tensors(1, 4, 4, 7)
    torch.testing.assert_close(second(q, k, v), quest_core.attention(q, k, v, "standard"))


def test_tokens_in_another_order_are_compared_with_themselves() -> None:
    """A host may sort its tokens in every layer, cut them into rows, and let a row borrow from another."""
    torch.manual_seed(0)
    first, second = pair("elliptical")
    q, k, before = tensors(1, 4, 4, 6)  # [1, H, 6, D]
    own = tensors(1, 4, 4, 6)[2]
    take = torch.tensor([[4, 0, 2, 5], [3, 1, 5, 2]])  # two rows of four tokens; 5 and 2 are borrowed
    give = torch.tensor([1, 5, 2, 4, 0, 3])  # the place from which each token is read

    def rows(x: Tensor) -> Tensor:
        return x[0][:, take].transpose(0, 1)  # [2, H, 4, D]

    quest_core.Mechanism("elliptical", num_heads=4, head_dim=4).score.follow(second.score)  # type: ignore[operator]
    first(q, k, before)
    expected_before = rows(before)
    with second.score.token_order(  # type: ignore[operator]
        to_tokens=lambda v: v.transpose(1, 2).flatten(0, 1)[give].transpose(0, 1)[None],
        from_tokens=rows,
    ):
        got = second(rows(q), rows(k), rows(own))
    torch.testing.assert_close(got, formula("elliptical", rows(q), rows(k), rows(own), expected_before, None, False))
    # What the second layer hands on lies token by token again.
    (kept,) = second.score._values.values()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(kept, own)


def test_stages_end_where_a_mapping_of_stacks_says() -> None:
    layers = nn.ModuleList([quest_core.Mechanism("elliptical", num_heads=4, head_dim=6) for _ in range(4)])
    quest_core.chain(layers, {"0": "a", "1": "a", "2": "b", "3": "b"})
    assert [layer.score._previous[0] is not None for layer in layers] == [False, True, False, True]  # type: ignore


def test_an_unlinked_layer_refuses_to_run() -> None:
    lonely = quest_core.Mechanism("elliptical", num_heads=4, head_dim=6)
    with pytest.raises(quest_core.UnsupportedError, match=r"quest_core.inject, or call quest_core.chain\(model\)"):
        lonely(*tensors(1, 4, 4, 5))
    with pytest.raises(quest_core.ConfigError, match="'elliptical' has a state"):
        quest_core.attention(*tensors(1, 4, 4, 5), "elliptical")


def encoder(name: str, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for i, parameter in enumerate(model.parameters()):  # layers that differ
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    return quest_core.inject(model, name)[0]


def test_injected_layers_follow_each_other() -> None:
    x = torch.randn(2, 5, 16)
    elliptical, plain = encoder("elliptical").eval(), encoder("standard").eval()
    assert not torch.allclose(elliptical(x), plain(x))
    torch.testing.assert_close(elliptical(x), elliptical(x))  # nothing is left over from the pass before
    with pytest.raises(quest_core.InjectionError, match="no layer follows another: layers.0.self_attn"):
        encoder("elliptical", 1)


def test_a_skipped_predecessor_is_an_error_and_never_standard_attention() -> None:
    first, second = pair("elliptical")
    one, two = tensors(1, 4, 4, 5), tensors(1, 4, 4, 5)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        second(*two)
    first(*one)
    second(*two)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        second(*two)  # the values of a pass are handed over once
    first(*one)
    with pytest.raises(quest_core.UnsupportedError, match="only this one was copied"):
        copy.deepcopy(second)(*two)


def test_threads_do_not_see_each_others_values() -> None:
    model = encoder("elliptical").eval()
    inputs = [torch.randn(2, 5, 16) for _ in range(16)]
    with torch.no_grad():
        want = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(torch.no_grad()(model), inputs))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_only_the_latest_forward_pass_is_recomputed(reentrant: bool) -> None:
    inputs, model = torch.randn(2, 2, 5, 16), encoder("elliptical")

    def run(x: Tensor, recompute: bool = True) -> Tensor:
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
def test_nothing_is_kept_after_the_backward_pass(recompute: bool) -> None:
    model, x = encoder("elliptical"), torch.randn(2, 5, 16, requires_grad=True)
    out = x
    for layer in model.layers:
        out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=False) if recompute else layer(out)
    loss = out.square().sum()
    scores = [layer.self_attn.mechanism.score for layer in model.layers]
    assert [len(score._step) for score in scores] == [0, 2, 2]
    loss.backward()
    assert not any(score._step or score._values for score in scores)


def test_copies_keep_their_own_chain() -> None:
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
def test_activation_checkpointing_works_where_another_thread_runs_backward(size: float) -> None:
    """As on a GPU, whose backward pass has a thread of its own; and in a step whose values are NaN."""
    model = encoder("elliptical")
    out = size * torch.randn(2, 5, 16)
    for layer in model.layers:
        out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(training: bool) -> None:
    x = torch.randn(2, 5, 16)
    gradients = []
    for reentrant in (None, False, True)[: 2 + training]:  # reentrant, the first pass records no gradients
        model = encoder("elliptical").train(training)
        out = x.clone().requires_grad_()
        for layer in model.layers:
            if reentrant is None:
                out = layer(out)
            else:
                out = torch.utils.checkpoint.checkpoint(layer, out, use_reentrant=reentrant)
        out.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_values_of_a_pass_that_ended_early_are_not_taken() -> None:
    layers = nn.ModuleList(quest_core.Attention(16, 2, "elliptical") for _ in range(3))
    quest_core.chain(layers)
    x = torch.randn(1, 5, 16)
    layers[1](layers[0](x))  # leaves the values of layer 1
    layers[0](x)
    with pytest.raises(quest_core.UnsupportedError, match="that layer was skipped"):
        layers[2](x)


@pytest.mark.parametrize("kind", ["inject", "chain"])
def test_a_layer_of_two_places_is_refused(kind: str) -> None:
    if kind == "chain":
        one, other = (quest_core.Attention(16, 2, "elliptical") for _ in range(2))
        model = nn.ModuleList([one, other, one, other])
    else:
        one, other = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        model = nn.ModuleList([one, other, one, other])
    with pytest.raises(quest_core.UnsupportedError, match=r"'0.*' and '2.*' are one layer, which would have"):
        quest_core.chain(model) if kind == "chain" else quest_core.inject(model, "elliptical")
    if kind == "inject":
        assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model)


def test_no_gradient_flows_through_the_metric() -> None:
    first, second = pair("elliptical")
    q, k, v = (x.requires_grad_() for x in tensors(1, 4, 4, 5))
    first(q, k, v * 2)
    second(q, k, v.detach()).sum().backward()
    assert v.grad is None


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_keys(n: int, is_causal: bool) -> None:
    first, second = pair("elliptical")
    q, k, v = torch.randn(1, 4, n, 6), torch.randn(1, 4, 0, 6), torch.randn(1, 4, 0, 6)
    first(q, k, v, is_causal=is_causal)
    assert torch.equal(second(q, k, v, is_causal=is_causal), torch.zeros(1, 4, n, 6))
