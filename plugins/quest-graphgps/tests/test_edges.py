"""TransformerConv: attention over edges equals attention over all pairs of which the others are hidden."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.nn import GATConv, GeneralConv, GPSConv, HANConv, HGTConv, RGATConv, TransformerConv

import quest_core
from quest_core.errors import CheckpointError, InjectionError, UnsupportedError

H, C = 3, 8


def bipartite(seed):
    """Features of 7 sources and 5 targets, and edges that leave one target without any."""
    torch.manual_seed(seed)
    pairs = (torch.rand(7, 4) < 0.5).nonzero().T
    return torch.randn(7, 6).double(), torch.randn(5, 4).double(), pairs


def of_all_pairs(conv, x, y, pairs, edges=None):
    """Return queries [5, 1, H, C], keys and values [5, 7, H, C] and logits [5, 7, H], −∞ for pairs without an edge."""
    feature, hidden = torch.zeros(5, 7, H, C).double(), torch.ones(5, 7, 1, dtype=torch.bool)
    hidden[pairs[1], pairs[0]] = False
    if edges is not None:
        feature[pairs[1], pairs[0]] = conv.lin_edge(edges).view(-1, H, C)
    q = conv.lin_query(y).view(-1, 1, H, C)
    k, v = (layer(x).view(-1, H, C) + feature for layer in (conv.lin_key, conv.lin_value))
    query, score = q, conv.mechanism.score
    key = k / C**0.5 if str(conv.config) == "standard" else nn.functional.normalize(k, dim=-1)
    if str(conv.config) == "qknorm":
        query, key = nn.functional.normalize(q, dim=-1) * score.query_scale, key * score.key_scale
    return q, k, v, (query * key).sum(-1).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("edge_dim", [None, 5])
@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm"])
def test_it_equals_plain_steps(attention, edge_dim):
    x, y, pairs = bipartite(0)
    edges = None if edge_dim is None else torch.randn(pairs.shape[1], edge_dim).double()
    conv = TransformerConv((6, 4), C, H, edge_dim=edge_dim).double()
    stock = conv((x, y), pairs, edges)
    quest_core.inject(conv, attention)
    if attention == "qknorm":
        torch.nn.init.uniform_(conv.mechanism.score.query_scale, 0.5, 2)
    out = conv((x, y), pairs, edges)
    _, _, v, logits = of_all_pairs(conv, x, y, pairs, edges)
    weights = logits.softmax(1).nan_to_num()  # of a target without edges
    torch.testing.assert_close(out, (weights[..., None] * v).sum(1).flatten(1) + conv.lin_skip(y))
    assert torch.equal(out, stock) is (attention == "standard")


def test_keys_are_scored_once_a_node():
    x, y, pairs = bipartite(3)
    conv, _ = quest_core.inject(TransformerConv((6, 4), C, H).double(), "quest")
    shapes = []
    conv.mechanism.score.register_forward_hook(
        lambda _, given, __: shapes.append([len(part[0, 0]) for part in given[:2]])
    )
    out = conv((x, y), pairs)
    set_masks(conv, torch.full((pairs.shape[1],), 50.0).double(), pairs)  # an explainer, whose masks keep all
    torch.testing.assert_close(conv((x, y), pairs), out)
    assert shapes == [[5, 7], [pairs.shape[1]] * 2]


def test_weights_are_returned():
    x, y, pairs = bipartite(1)
    conv, _ = quest_core.inject(TransformerConv((6, 4), C, H).double(), "quest")
    _, (index, weights) = conv((x, y), pairs, return_attention_weights=True)
    assert index is pairs
    torch.testing.assert_close(weights, of_all_pairs(conv, x, y, pairs)[3].softmax(1)[pairs[1], pairs[0]])


def test_the_report_names_both_kinds_and_what_adds_instead_of_multiplying():
    model = torch.nn.ModuleList([GPSConv(24, TransformerConv(24, C, H), heads=3), GATConv(24, 8)])
    _, report = quest_core.inject(model, "quest")
    kinds = {r.path: r.host_class for r in report.replacements}
    assert kinds == {"0.attn": "MultiheadAttention", "0.conv": "TransformerConv"}
    assert "; not replaced (additive attention, no q·k): 1" in str(report)


def test_what_multiplies_and_stays_is_an_error():
    """Neither the names nor the layers of these say that they are attention."""
    kinds = (["a"], [("a", "to", "a")])
    dots = {"attention": True, "heads": 2, "attention_type": "dot_product"}
    others = [HGTConv(24, 24, kinds, heads=2), GeneralConv(24, 24, **dots)]
    adding = [HANConv(24, 24, kinds, heads=2), RGATConv(24, 8, 2, heads=2), GeneralConv(24, 24, heads=2)]
    model = torch.nn.ModuleList([TransformerConv(24, C, H), *others, *adding])
    with pytest.raises(
        InjectionError, match=r"leave 2 as they are.* '1' \(HGTConv\), '2' \(GeneralConv\); .* say allow_partial"
    ):
        quest_core.inject(model, "quest")
    _, report = quest_core.inject(model, "quest", allow_partial=True)
    assert [*report.left_alone] == ["1", "2", "3", "4"]
    assert report.replacements[0].kernel == "softmax over edges"


def test_lazy_layers_need_a_batch_first():
    model = torch.nn.ModuleDict({"conv": TransformerConv(-1, C, H)})
    with pytest.raises(InjectionError, match="'conv' .TransformerConv. has no weights yet.*run the model once before"):
        quest_core.inject(model, "quest")
    pairs = torch.randint(5, (2, 12))
    quest_core.inject(model, "quest", example=lambda net: net["conv"](torch.randn(5, 6), pairs))


@pytest.mark.parametrize("attention", ["quest+sigmoid", "sinkhorn", "elliptical", "linear", "quest(kv_heads=1)"])
def test_what_needs_all_keys_is_an_error_that_says_so(attention):
    model = torch.nn.ModuleList([TransformerConv(6, C, H), TransformerConv(6, C, H)])
    with pytest.raises(UnsupportedError, match="one by one|cannot change their shape|no weights for the"):
        quest_core.inject(model, attention)
    assert {type(layer) for layer in model} == {TransformerConv}


def test_a_checkpoint_of_another_attention_is_an_error():
    conv = TransformerConv(6, C, H)
    stock = {name: x.clone() for name, x in conv.state_dict().items()}
    quest_core.inject(conv, "quest")
    quest = {name: x.clone() for name, x in conv.state_dict().items()}
    other, _ = quest_core.inject(TransformerConv(6, C, H), "qnorm")
    before = {name: x.clone() for name, x in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="quest"):
        other.load_state_dict(quest)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    with pytest.warns(quest_core.AttentionMismatchWarning):
        other.load_state_dict(stock, strict=False)
    conv.load_state_dict(quest)


@pytest.mark.parametrize("attention", ["quest(init=12)", "qknorm"])
def test_a_reset_starts_the_attention_again(attention):
    """Between folds, and in copies that to_hetero makes."""
    conv, _ = quest_core.inject(TransformerConv(6, C, H), attention, fresh=True)
    start = [p.detach().clone() for p in conv.mechanism.parameters()]
    norms = conv.projections.norms(conv, conv.head_sizes, "q")
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.mul_(3)
    conv.reset_parameters()
    torch.testing.assert_close(list(conv.mechanism.parameters()), [nn.Parameter(p) for p in start])
    if "init" in attention:
        torch.testing.assert_close(conv.projections.norms(conv, conv.head_sizes, "q"), norms)


def test_masks_of_explanations_act_on_copies_too():
    torch.manual_seed(0)
    x, pairs = torch.randn(5, 6), torch.randint(5, (2, 12))
    conv, _ = quest_core.inject(TransformerConv(6, C, H), "quest")
    for layer in (copy.deepcopy(conv), conv):  # a copy makes the fast path of its class again
        plain = layer(x, pairs)
        set_masks(layer, torch.full((12,), -50.0), pairs)
        assert not torch.allclose(layer(x, pairs), plain)


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_a_monitor_sees_the_logits_of_edges(attention):
    x, y, pairs = bipartite(2)
    conv, _ = quest_core.inject(TransformerConv((6, 4), C, H).double(), attention)
    out = conv((x, y), pairs)
    with quest_core.Monitor(conv) as monitor:
        assert torch.equal(conv((x, y), pairs), out)
        (seen,) = monitor.collect().values()
    q, k, _, logits = of_all_pairs(conv, x, y, pairs)
    found = pairs[1].unique()  # targets with edges
    assert len(found) < 5
    query_norms, key_norms = q[found, 0].norm(dim=-1), k[pairs[1], pairs[0]].norm(dim=-1)
    wanted = {
        "max_logit": logits.amax((0, 1)),
        "entropy": torch.special.entr(logits[found].softmax(1)).sum(1).mean(0),
        "query_norm_max": query_norms.amax(0),
        "query_norm_mean": query_norms.mean(0),
        "key_norm_max": key_norms.amax(0),
        "key_norm_mean": key_norms.mean(0),
    }
    assert seen == {name: pytest.approx(x.tolist()) for name, x in wanted.items()}
