"""Monitor: its numbers against plain formulas in float64, whatever path the model takes, and nothing when it is off."""

import copy
import math
import pickle

import models
import pytest
import torch
from allocations import Largest
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quest_core
from quest_core import ConfigError, InjectionError, Monitor
from quest_core.mechanism import count_kv_heads
from quest_core.mechanisms.naive import visible
from quest_core.tools import monitor as monitor_module
from quest_core.tools import packing
from quest_core.tools.monitor import Call

B, H, N, M, D = 2, 4, 5, 7, 3

NAMES = {"max_logit", "entropy", "top_key_share", "query_norm_mean", "query_norm_max", "key_norm_mean", "key_norm_max"}


def mechanism(attention, heads=H):
    return quest_core.Mechanism(attention, num_heads=heads, head_dim=D).eval()


def inputs(attention="quest", n=N, m=M):
    groups = count_kv_heads(attention, H)
    return torch.randn(B, H, n, D) * 3, torch.randn(B, groups, m, D), torch.randn(B, groups, m, D)


def masks(n=N, m=M):
    some = torch.rand(n, m) > 0.4
    some[1] = False  # a query that sees no key
    some[0, -1] = True  # no draw hides the whole future, which some mechanisms refuse
    padding = torch.ones(B, 1, 1, m, dtype=torch.bool)
    padding[0, ..., 4:] = False
    padding[1, ..., 0] = False
    per_head = torch.randn(B, H, n, m).masked_fill(torch.rand(B, H, n, m) > 0.6, -math.inf)
    return {
        "everything": {},
        "causal": {"is_causal": True},
        "some pairs": {"attn_mask": some},
        "padding": {"attn_mask": padding},
        "padding, causal": {"attn_mask": padding, "is_causal": True},
        "some pairs, causal": {"attn_mask": some, "is_causal": True},
        "additive": {"attn_mask": per_head},
        "queries": {"attn_mask": torch.rand(B, 1, n, 1) > 0.3},
    }


def expected(attention, q, k, v, *, attn_mask=None, is_causal=False):
    """The documented numbers, in float64 and from all pairs at once."""
    plain = copy.deepcopy(attention).double()
    q, k, v = q.double(), k.double(), v.double()
    mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.double()
    _, weights, logits = plain.forward_with_logits(q, k, v, attn_mask=mask, is_causal=is_causal)
    seen = visible(*logits.shape[2:], mask, is_causal).expand_as(logits)
    queries, keys = seen.any(3), seen.any(2).any(1, keepdim=True)  # [B, H, N], [B, 1, M]
    share = weights / weights.sum(3, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(3)
    columns = share.nan_to_num(0).sum(2)  # [B, H, M]
    out = {
        "top_key_share": (columns.amax(2) / columns.sum(2)).nanmean(0),
        "max_logit": logits.where(seen, -math.inf).amax((0, 2, 3)),
        "entropy": entropy.where(queries, math.nan).nanmean((0, 2)),
    }
    for name, x, some in (("query", q, queries), ("key", k, keys)):
        norms = x.norm(dim=-1)
        out[f"{name}_norm_mean"] = norms.where(some, math.nan).nanmean((0, 2))
        out[f"{name}_norm_max"] = norms.where(some, 0).amax((0, 2))
    return {name: per_head.tolist() for name, per_head in out.items()}


def assert_same(found, wanted, said=""):
    assert found.keys() - {"logit_bound"} == wanted.keys() - {"logit_bound"}
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=2e-5, abs=2e-6), f"{said} {name}"


@pytest.mark.parametrize(
    "attention",
    [
        "standard",
        "quest",
        "quest(scale=3)",
        "qknorm-hs",
        "quest+gqa(kv_heads=2)",
        "quest+kdgqa(kv_heads=2)",
        "quest+pgqa(kv_heads=2, noise_in_eval=false)",
        "quest+sigmoid",
        "standard+sigmoid(bias=-1)+gqa(kv_heads=2)",
        "quest+sinkhorn",
        "quest+sinkhorn(iterations=4, eps=2)+gqa(kv_heads=2)",
    ],
)
@pytest.mark.parametrize("block", [16, 2**19])
def test_numbers_are_those_of_the_formulas(attention, block, monkeypatch):
    monkeypatch.setattr(monitor_module, "BLOCK", block)
    m = mechanism(attention)
    q, k, v = inputs(attention)
    for name, options in masks().items():
        if options.get("is_causal") and m._no_causal:
            continue
        with Monitor(m) as monitor:
            m(q, k, v, **options)
            seen = monitor.collect()["mechanism"]
        assert_same(seen, expected(m, q, k, v, **options), name)
        if "logit_bound" in seen:
            assert all(b >= x - 1e-5 for b, x in zip(seen["logit_bound"], seen["max_logit"], strict=True)), name


def test_elliptical_is_observed_with_the_queries_that_it_stretched():
    first, second = mechanism("elliptical-quest"), mechanism("elliptical-quest")
    model = nn.ModuleList([first, second])
    quest_core.chain(model, {"0": "all", "1": "all"})
    q, k, v = inputs(n=M)
    with Monitor(model) as monitor:
        first(q, k, v)
        before = copy.deepcopy(second)
        second(q, k, v + torch.randn_like(v))
    assert before.monitor is None
    seen = monitor.collect()
    assert seen["0"]["max_logit"] == pytest.approx(expected(mechanism("quest"), q, k, v)["max_logit"], rel=1e-5)
    assert seen["1"]["max_logit"] != pytest.approx(seen["0"]["max_logit"], rel=1e-2)
    assert seen["1"]["query_norm_max"] == seen["0"]["query_norm_max"]
    assert all(b > x for b, x in zip(seen["1"]["logit_bound"], seen["1"]["max_logit"], strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["linear", "cosine", "aft-simple"])
def test_families_report_norms(attention, causal):
    m = quest_core.Mechanism(attention, num_heads=H, head_dim=D)
    q, k, v = inputs(n=M)
    visible = torch.ones(B, 1, 1, M, dtype=torch.bool)
    visible[0, ..., 3:] = False
    with Monitor(m) as monitor:
        m(q, k, v, attn_mask=visible, is_causal=causal)
    seen = monitor.collect()["mechanism"]
    assert seen.keys() == {name for name in NAMES if "norm" in name}
    real = visible[:, 0, 0]
    assert seen["key_norm_mean"] == pytest.approx([k[:, h].norm(dim=-1)[real].mean().item() for h in range(H)])
    assert seen["query_norm_max"] == pytest.approx([q[:, h].norm(dim=-1).max().item() for h in range(H)])


@pytest.mark.parametrize("attention", ["quest+gqa(kv_heads=2)", "linear"])
def test_decoding_adds_up_to_the_whole(attention):
    layer = quest_core.Attention(12, 4, attention)
    x = torch.randn(2, 6, 12)
    found = []
    with Monitor(layer) as monitor:
        for sizes, cache in (([6], None), ([2, 1, 3], quest_core.Cache())):
            for piece in x.split(sizes, dim=1):
                layer(piece, is_causal=True, cache=cache)
            seen = monitor.collect(flat=True).items()
            found.append({name: value for name, value in seen if "top_key_share" not in name})  # it is of a call
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_fused_and_weights_paths_report_the_same():
    m = quest_core.MultiheadAttention(12, 4, batch_first=True, attention="quest")
    x, padding = torch.randn(2, 6, 12), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with Monitor(m) as monitor:
        seen = []
        for need_weights in (False, True):
            m(x, x, x, key_padding_mask=padding, need_weights=need_weights)
            seen.append(monitor.collect())
    assert seen[0] == seen[1]
    assert list(seen[0]) == ["mechanism"]


def test_residual_logits_count():
    m, (q, k, v) = mechanism("standard"), inputs()
    residual = torch.randn(B, H, N, M) * 4
    mask = (torch.rand(N, M) > 0.3) | (torch.arange(M) == 0)  # every query sees a key
    for options in ({}, {"attn_mask": mask}, {"attn_mask": torch.zeros(N, M).masked_fill(~mask, -math.inf)}):
        with Monitor(m) as monitor:
            _, weights, logits = m.forward_with_logits(q, k, v, residual=residual, **options)
            seen = monitor.collect()["mechanism"]
        visible = logits.masked_fill(~mask, -math.inf) if options else logits
        assert seen["max_logit"] == pytest.approx(visible.amax((0, 2, 3)).tolist())
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
        assert seen["entropy"] == pytest.approx(entropy.tolist(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_full(dtype):
    m = mechanism("standard")
    q, k, v = (x.to(dtype) for x in inputs())
    wanted = expected(m, q, k, v)
    with Monitor(m) as monitor:
        m(q, k, v)
        assert_same(monitor.collect()["mechanism"], wanted)
        with torch.autocast("cpu", torch.bfloat16):
            m(q.float(), k.float(), v.float())
        assert_same(monitor.collect()["mechanism"], wanted)


def test_entropy_does_not_cancel_at_large_logits():
    q = torch.tensor([1e6, 0.0]).expand(1, 1, 3, 2)
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])[None, None]  # two equal winners: ln 2
    m = quest_core.Mechanism("quest", num_heads=1, head_dim=2)
    with Monitor(m) as monitor:
        m(q, k, k)
    seen = monitor.collect()["mechanism"]
    assert seen["entropy"] == pytest.approx([math.log(2)])
    assert seen["max_logit"] == [1e6]


def test_numbers_that_are_none_stay_visible():
    """A model that has diverged must not look healthy, nor must a row that sees nothing."""
    m, (q, k, v) = mechanism("standard"), inputs()
    with Monitor(m) as monitor:
        m(q, k, v, attn_mask=torch.zeros(N, M, dtype=torch.bool))
        assert all(math.isnan(x) for values in monitor.collect()["mechanism"].values() for x in values)
        m(q[:, :, :0], k, v)
        assert monitor.collect() == {}
        q[1, 2, 3, 0] = math.nan
        m(q, k, v)
        seen = monitor.collect()["mechanism"]
    for name in ("max_logit", "entropy", "query_norm_mean", "query_norm_max"):
        assert [math.isnan(x) for x in seen[name]] == [False, False, True, False], name


def test_a_normalizer_from_elsewhere_is_asked_for_its_weights():
    class Squares(quest_core.mechanisms.base.Normalizer):
        def weights(self, logits, mask):
            return logits.square() if mask is None else logits.square().masked_fill(~mask, 0)

    m, (q, k, v) = mechanism("quest"), inputs()
    m.normalizer, m.fused = Squares(None), False  # as its Part would say
    wanted = expected(m, q, k, v, is_causal=True)
    with Monitor(m) as monitor:
        m(q, k, v, is_causal=True)
    assert_same(monitor.collect()["mechanism"], wanted)


def test_a_score_may_choose_its_factor_in_every_call():
    class Doubled(quest_core.mechanisms.Score):
        def forward(self, q, k, v, **how):
            q, k, scale = super().forward(q, k, v, **how)
            return q, k, 2 * scale

    m, (q, k, v) = mechanism("standard"), inputs()
    m.score = Doubled(None, scale=0.5)
    with Monitor(m) as monitor:
        m(q, k, v)
    seen = torch.tensor(monitor.collect()["mechanism"]["max_logit"], dtype=q.dtype)
    torch.testing.assert_close(seen, (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).amax((0, 2, 3)))


# --- collecting -----------------------------------------------------------------------------------------------------


def encoder(attention="quest"):
    return quest_core.inject(models.encoder(8, dropout=0.1), attention)[0]


def test_passes_are_put_together_by_tokens():
    m = mechanism("quest")
    long, short = inputs(n=9), inputs(n=2)
    with Monitor(m) as monitor:
        m(*long)
        one = monitor.collect()["mechanism"]
        m(*short)
        other = monitor.collect()["mechanism"]
        m(*long)
        m(*short)
        both = monitor.collect()["mechanism"]
        assert monitor.collect() == {}
    for name in ("max_logit", "query_norm_max", "key_norm_max", "logit_bound"):
        assert both[name] == [max(a, b) for a, b in zip(one[name], other[name], strict=True)]
    for name in ("entropy", "query_norm_mean"):
        wanted = [(9 * a + 2 * b) / 11 for a, b in zip(one[name], other[name], strict=True)]
        assert both[name] == pytest.approx(wanted)


@pytest.mark.parametrize(
    "attention",
    ["standard", "quest+gqa(kv_heads=2)", "quest+sigmoid", "quest+sinkhorn", "linear", "aft-simple", "cosine"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_count_their_own_tokens_and_no_padding(attention, causal):
    m = mechanism(attention)
    if causal and m._no_causal:
        return
    lengths = [5, 0, 9, 4, 70, 1]
    groups = count_kv_heads(attention, H)
    q, k, v = (torch.randn(sum(lengths), heads, D) for heads in (H, groups, groups))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q[starts[1:].long() - 1] *= 10  # the last token of a sequence is what padding repeats
    with Monitor(m) as monitor:
        quest_core.attention_packed(q, k, v, m, cu_seqlens=starts, is_causal=causal)
        packed = monitor.collect()["mechanism"]
        for sequence in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            m(*(x[None].transpose(1, 2) for x in sequence), is_causal=causal)
        single = monitor.collect()["mechanism"]
    assert_same(packed, single)
    assert m.monitor is None


def test_a_packed_call_counts_once():
    m = mechanism("quest")
    lengths = [200, 3, 3]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    plan = quest_core.PackingPlan(starts)
    assert len(plan.layout(packing.WASTE, torch.device("cpu")).tokens) == 2
    q, k, v = torch.randn(3, sum(lengths), H, D)
    norms = q.norm(dim=-1).amax(0).tolist()
    with Monitor(m, every=2) as monitor:
        seen = []
        for _ in range(4):
            quest_core.attention_packed(q, k, v, m, cu_seqlens=plan)
            found = monitor.collect()
            seen.append(bool(found))
            if found:
                assert found["mechanism"]["query_norm_max"] == pytest.approx(norms)
    assert seen == [True, False, True, False]


def test_collect_gives_plain_values_by_path():
    model = encoder()
    with Monitor(model) as monitor:
        model(torch.randn(2, 5, 8))
        nested = monitor.collect()
        model(torch.randn(2, 5, 8))
        flat = monitor.collect(flat=True)
    assert list(nested) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert nested["layers.0.self_attn"].keys() == NAMES | {"logit_bound"}
    assert all(type(x) is float for names in nested.values() for values in names.values() for x in values)
    assert len(flat) == 2 * 8 * 4
    assert type(flat["layers.1.self_attn/max_logit/head3"]) is float


def test_norms_and_bound_without_the_logits():
    m, (q, k, v) = mechanism("quest(scale=2)"), inputs()
    with Monitor(m, logits=False) as monitor:
        m(q, k, v)
    seen = monitor.collect()["mechanism"]
    assert seen.keys() == {name for name in NAMES if "norm" in name} | {"logit_bound"}
    assert seen["logit_bound"] == pytest.approx([2 * x for x in seen["query_norm_max"]])


def test_errors_name_the_fix():
    stock = nn.MultiheadAttention(8, 2)
    with pytest.raises(InjectionError, match=r"MultiheadAttention has no attention of quest_core.*inject"):
        Monitor(stock)
    model = encoder()
    for every in (0, 1.5):
        with pytest.raises(ConfigError, match=f"every is {every}"):
            Monitor(model, every=every)


def test_several_monitors_see_the_same_and_stop_by_themselves():
    model, x = encoder(), torch.randn(2, 5, 8)
    first, second = Monitor(model), Monitor(model)
    model(x)
    assert first.collect() == second.collect() != {}
    first.remove()
    first.remove()
    model(x)
    assert (first.collect(), bool(second.collect())) == ({}, True)
    second.remove()
    assert all(m.monitor is None for m in model.modules() if isinstance(m, quest_core.Mechanism))


# --- what a monitor must not change ---------------------------------------------------------------------------------


def test_training_is_the_same_with_and_without():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = encoder("quest+dgqa(kv_heads=2)").train()
        monitor = Monitor(model) if watched else None
        out = model(torch.randn(2, 5, 8))
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters()), *model.state_dict().values()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    layer = next(iter(monitor.layers.values()))
    assert layer.seen
    assert not any(x.requires_grad for x in layer.seen.values())


def test_recomputation_is_not_counted_twice():
    m = mechanism("quest")
    q, k, v = inputs()
    monitor = Monitor(m, every=2)
    for _ in range(2):
        q.requires_grad_(True)
        torch.utils.checkpoint.checkpoint(m, q, k, v, use_reentrant=False).sum().backward()
    assert monitor.layers["mechanism"].calls == 2


def test_forward_passes_without_numbers_are_not_counted():
    attention = quest_core.Attention(8, 2, "quest")
    monitor, x = Monitor(attention), torch.randn(2, 4, 8)
    attention(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        attention(torch.empty(2, 4, 8))
    seen = monitor.collect()
    attention(x)
    assert seen == monitor.collect()


def test_state_dicts_copies_and_pickles_have_no_monitor():
    model = encoder().eval()
    keys = list(model.state_dict())
    with Monitor(model) as monitor:
        assert list(model.state_dict()) == keys
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            x = torch.randn(2, 5, 8)
            torch.testing.assert_close(twin(x), model(x))
            monitor.collect()
            twin(x)
            assert monitor.collect() == {}
        shallow = copy.copy(model.layers[0].self_attn.mechanism)
        assert shallow.monitor is None
        assert model.layers[0].self_attn.mechanism.monitor is not None
    assert model.layers[0].self_attn.mechanism.monitor is None


def test_compiles_without_a_break_when_off_and_with_one_when_on():
    layer = quest_core.Attention(12, 4, "quest").eval()
    x = torch.randn(2, 6, 12)
    wanted = layer(x)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), wanted)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    with Monitor(layer) as monitor:
        torch.testing.assert_close(compiled(x), wanted)
        found = monitor.collect(flat=True)
        layer(x)
        assert found == pytest.approx(monitor.collect(flat=True))
        torch._dynamo.reset()  # the graph with its break would be found again
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            torch.compile(layer, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), wanted)


def test_export_leaves_the_monitor_out():
    layer = quest_core.Attention(12, 4, "quest").eval()
    x = torch.randn(2, 6, 12)
    plain = torch.export.export(layer, (x,))
    with Monitor(layer) as monitor:
        observed = torch.export.export(layer, (x,))
        assert monitor.collect() == {}
    assert [n.target for n in observed.graph.nodes] == [n.target for n in plain.graph.nodes]


@pytest.mark.parametrize("attention", ["quest", "standard+sigmoid"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_bounded(attention, causal, monkeypatch):
    monkeypatch.setattr(monitor_module, "BLOCK", 4096)
    m = mechanism(attention)
    q, k = torch.randn(1, H, 256, D), torch.randn(1, H, 256, D)
    monitor = Monitor(m)
    with Largest() as largest:
        layer = monitor.layers["mechanism"]
        layer._count(Call(q, k, None, causal, (1, H, 256, 256), layer._logit_form(q, k, 1.0)))
    assert largest.elements <= 4096
    assert len(monitor.collect()["mechanism"]["entropy"]) == H
