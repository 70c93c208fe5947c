"""Batches of graphs of very different sizes: when they are packed. test_conformance.py compares them with the host."""

import pytest
import torch
from models import RAGGED, SIZES, ConvModel, conv_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import quest_core
from quest_core.tools.packing import attention_packed
from quest_graphgps import attention


@pytest.fixture
def packed(monkeypatch):
    """Return a list with an entry for every packed call."""
    calls = []

    def count(*arguments, **options):
        calls.append(1)
        return attention_packed(*arguments, **options)

    monkeypatch.setattr(attention, "attention_packed", count)
    return calls


def model(spec, dropout=0.0):
    torch.manual_seed(0)
    return quest_core.inject(ConvModel(dropout), spec, fresh=True)[0].double()


def inputs(sizes):
    torch.manual_seed(1)
    return tuple(x.double() if x.is_floating_point() else x for x in conv_inputs(sizes))


@pytest.mark.parametrize(("packing", "small", "ragged"), [("auto", 0, 2), ("always", 2, 2), ("never", 0, 0)])
def test_a_batch_is_packed_where_its_logits_cost_more_than_copies(packed, monkeypatch, packing, small, ragged):
    monkeypatch.setattr(attention.GraphAttention, "packing", packing)
    layers = model("quest", dropout=0.5)
    layers(*inputs(SIZES))
    assert len(packed) == small
    layers(*inputs(RAGGED))
    assert len(packed) == small + ragged


def test_padding_without_values_is_not_read(packed):
    attn = model("quest").convs[0].attn.eval()
    hidden = torch.arange(24) >= torch.tensor([[24], [2], [3]])
    x = torch.randn(3, 24, 16, dtype=torch.double)

    def call(x, hidden):
        return attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    many = torch.func.vmap(call)(torch.stack([x, x]), torch.stack([hidden, hidden.flip(0)]))
    recorded = make_fx(call)(x, hidden)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(mode.from_tensor(x), mode.from_tensor(hidden)).shape == x.shape
    assert not packed
    for got, other in ((many[1], hidden.flip(0)), (recorded(x, hidden.flip(0)), hidden.flip(0)), (many[0], hidden)):
        torch.testing.assert_close(got[~other], call(x, other)[~other])
    assert packed


def test_the_rule_is_applied_again_to_other_padding():
    """Layers of one batch share a plan; another batch, also in the same tensor, and another rule do not."""
    hidden = torch.arange(20) >= torch.tensor([[20], [2], [3]])
    plan = attention.ragged_plan(hidden, 2)
    assert plan.lengths == [20, 2, 3]
    assert attention.ragged_plan(hidden.clone(), 2) is plan
    hidden[1, 2] = False
    assert attention.ragged_plan(hidden, 2).lengths == [20, 3, 3]
    assert attention.ragged_plan(torch.zeros(3, 20, dtype=torch.bool), 2) is None
    assert attention.ragged_plan(hidden, 64) is None
    assert attention.ragged_plan(hidden, 64, always=True) is not None
    assert attention.ragged_plan(torch.ones(3, 20, dtype=torch.bool), 2, always=True) is None


def test_a_batch_of_an_evaluation_is_trained_on():
    """Lightning evaluates in inference mode, whose tensors cannot be saved for a backward pass."""
    layers = model("quest")
    with torch.inference_mode():
        layers(*inputs(RAGGED))
    layers(*inputs(RAGGED)).sum().backward()
    assert not attention._last[2].cu_seqlens.is_inference()


def test_standard_keeps_the_hosts_random_numbers_where_it_drops_weights(packed):
    layers = model("standard", dropout=0.5)
    layers(*inputs(RAGGED))
    assert not packed
    layers.eval()(*inputs(RAGGED))
    assert len(packed) == 2


def test_weights_of_packed_nodes_are_dropped(packed):
    attn, x = model("quest", dropout=0.5).convs[0].attn, inputs(RAGGED)[0]
    real = torch.arange(max(RAGGED)) < torch.tensor(RAGGED)[:, None]
    dense = torch.zeros(*real.shape, 16, dtype=torch.double)
    dense[real] = x
    one, two = (attn(dense, dense, dense, key_padding_mask=~real, need_weights=False)[0] for _ in range(2))
    assert len(packed) == 2
    assert not torch.equal(one, two)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spec", ["standard", "quest", "sinkhorn", "elliptical"])
@pytest.mark.parametrize("sizes", [(3, 0, 4), (24, 0, 2, 1)], ids=["padded", "packed"])
def test_empty_graphs_are_finite(spec, sizes, training):
    """PyTorch gives NaN to a fully hidden row and its gradient if weights are requested."""
    layers = model(spec).train(training)
    x = torch.randn(sum(sizes), 16, dtype=torch.double, requires_grad=True)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    out = layers(x, torch.zeros(2, 0, dtype=torch.long), batch, torch.zeros(0, 16, dtype=torch.double))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    for attn in (conv.attn for conv in layers.convs):
        dense, hidden = torch.randn(2, 5, 16, dtype=torch.double), torch.tensor([[False] * 5, [True] * 5])
        result, weights = attn.train(training)(dense, dense, dense, key_padding_mask=hidden)
        assert result.isfinite().all()
        assert weights.isfinite().all()


def test_maps_are_of_the_batch_that_the_host_pads(packed):
    one = model("quest").eval()
    one(*inputs(RAGGED))
    assert packed
    maps = quest_core.attention_maps(one, inputs(RAGGED))
    assert list(maps) == [r.path for r in one.attention_report.replacements]
    for weights in maps.values():
        assert (weights[:, 0, 0] > 0).sum(-1).tolist() == list(RAGGED)
