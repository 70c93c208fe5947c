"""Every mechanism of the zoo: its promises, its reference, its place in `quest list` and in a model."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import quest_core
import quest_zoo
from quest_core.cli import main
from quest_core.registry import mechanisms, owner
from quest_core.testing import check_mechanism
from quest_core.testing.mechanisms import CHECKS
from quest_core.testing.truth import exact

ZOO = [name for name, part in mechanisms().items() if owner(part).startswith("quest-zoo ")]
WIDE = [*ZOO, "quest+sink", "quest+softmax1+gqa(kv_heads=2)", "entmax(alpha=2)", "entmax(alpha=1.1)", "ssmax+sink"]
WIDE += ["quest+sink+xsa", "quest+softpick+alibi", "gqa(kv_heads=2)+alibi+xsa", "sinkhorn+softcap(cap=2)+xsa"]
WIDE += ["gate(per=feature)", "quest+sink+forget+diff", "quest+diff-v1+alibi+pair-norm"]
WIDE += ["gqa(kv_heads=2)+diff-v1+pair-norm"]
FORMED = {"entmax", "softpick", "softcap"}  # weights are formed
SLOW = {"compiles", "devices", "dropout"}


@pytest.mark.parametrize("name", ZOO)
def test_it_keeps_its_promises(name):
    check_mechanism(name, checks=[check for check in CHECKS if check not in SLOW])


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_it_compiles_and_drops(name):
    check_mechanism(name, checks=sorted(SLOW))


@pytest.mark.parametrize("spec", WIDE)
@pytest.mark.parametrize(
    ("is_causal", "kind"), [(False, "no mask"), (True, "no mask"), (True, "additive"), (False, "boolean")]
)
def test_outputs_and_gradients_are_those_of_the_reference(spec, is_causal, kind):
    made = quest_core.Mechanism(spec, num_heads=4, head_dim=16).double()
    groups = made.dims.kv_heads
    q, k, v = (3 * torch.randn(2, heads, 70, 16, dtype=torch.float64) for heads in (4, groups, groups))
    inputs = [x.requires_grad_() for x in (q, k, v)] + list(made.parameters())
    if is_causal and not all(part.causal for part in made.config.components):
        with pytest.raises(quest_core.UnsupportedError, match="cannot be causal"):
            made(q, k, v, is_causal=True)
        return
    masks = {"additive": torch.randn(2, 1, 1, 70).double(), "boolean": torch.rand(2, 1, 70, 70) > 0.5}
    masks["boolean"][:, :, 3] = False  # a query that sees no key
    how = {"is_causal": is_causal, "attn_mask": masks.get(kind)}
    if made.config.needs_input:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        how["x"] = torch.randn(2, 70, 64, dtype=torch.float64, requires_grad=True)
        inputs.append(how["x"])
    with mock.patch.object(made.normalizer, "weights", wraps=made.normalizer.weights) as weights:
        out = made(q, k, v, **how)
    names = {part.name for part in made.config.components}
    assert weights.called == (bool(FORMED & names) or ("diff-v1" in names and bool({"gqa", "alibi"} & names)))
    want = exact(made, q, k, v, **how)[0]
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(out)
    got, truth = (torch.autograd.grad(y, inputs, upstream) for y in (out, want))
    torch.testing.assert_close(got, truth, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["softmax1", "sink", "sink+gqa(kv_heads=2)"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_a_sink_on_a_cpu_is_no_further_key(name, masked, lower):
    made = quest_core.Mechanism(name, num_heads=4, head_dim=16)
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, made.dims.kv_heads, made.dims.kv_heads))
    mask = torch.rand(2, 1, 9, 9) > 0.5 if masked else None
    want = exact(made, q, k, v, attn_mask=mask, is_causal=True)[0]
    with mock.patch("torch.nn.functional.pad", side_effect=AssertionError), torch.autocast("cpu", enabled=lower):
        out = made(q, k, v, attn_mask=mask, is_causal=True)
    assert out.dtype == (torch.bfloat16 if lower else torch.float32)
    torch.testing.assert_close(out.float(), want.float(), atol=0.03 if lower else 1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "logits", "weights"),
    [
        ("softmax1", [0.0, 0.0, 0.0], [0.25, 0.25, 0.25]),
        ("sink(logit=1.0986122886681098)", [0.0, 0.0, 0.0], [1 / 6, 1 / 6, 1 / 6]),  # log 3
        ("entmax(alpha=2)", [0.5, 0.0, -1.0], [0.75, 0.25, 0.0]),
        ("entmax", [1.0, 1.0, -9.0], [0.5, 0.5, 0.0]),
        ("softpick", [0.6931471805599453, 0.0, -0.6931471805599453], [2 / 3, 0.0, 0.0]),  # log 2
    ],
)
def test_weights_that_a_hand_can_compute(name, logits, weights):
    normalizer = quest_core.Mechanism(name, num_heads=1, head_dim=2).normalizer.double()
    found = normalizer.weights(torch.tensor(logits, dtype=torch.float64)[None, None, None], None)
    torch.testing.assert_close(found.flatten(), torch.tensor(weights, dtype=torch.float64), atol=1e-7, rtol=0)


def test_softmax_is_a_special_case():
    """A sink's logit that tends to −∞ leaves the softmax, and ssmax of slope 1/log(n) is the softmax."""
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    want = quest_core.attention(q, k, v, "standard")
    for spec in ("sink(logit=-60)", f"ssmax(init={1 / torch.tensor(9.0).log().item()})"):
        made = quest_core.Mechanism(spec, num_heads=2, head_dim=8).double()
        torch.testing.assert_close(made(q, k, v), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["entmax", "softpick"])
def test_no_keys_give_zeros(name):
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8)
    assert torch.equal(quest_core.attention(q, k, v, name), torch.zeros(1, 2, 3, 8))


def test_an_alpha_beyond_sparsemax_is_an_error():
    with pytest.raises(quest_core.ConfigError, match="alpha is 2.5; expected 1.05 to 2"):
        quest_core.Mechanism("entmax(alpha=2.5)")


def test_entmax_has_a_second_derivative():
    made = quest_core.Mechanism("entmax", num_heads=2, head_dim=4).double()
    inputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(made, inputs)


def test_it_is_listed(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out.partition("From quest-zoo")[2]
    classes = [part for part in vars(quest_zoo).values() if isinstance(part, type)]
    assert sorted(ZOO) == sorted(part.name for part in classes)
    assert all(f"\n  {name} " in listed for name in ZOO)


def test_parts_are_named_in_any_order():
    config = quest_core.AttentionConfig.parse("xsa+softcap(cap=30)+quest")
    assert str(config) == "quest+softcap+xsa(cap=30.0)"
    assert config == quest_core.AttentionConfig.parse("quest+xsa+softcap(cap=30)")
    with pytest.raises(quest_core.ConfigError, match="two choices for the score_mod: 'alibi' and 'softcap'"):
        quest_core.AttentionConfig.parse("alibi+softcap")


@pytest.mark.parametrize("name", ["softcap(cap=0.3)", "alibi", "sigmoid+alibi", "sink+softcap(cap=0.3)+xsa", "diff-v1"])
def test_what_is_watched_is_what_is_computed(name):
    """The Monitor and the maps see logits and weights as a score mod leaves them."""
    layer = quest_core.Attention(32, 4, name)
    x = 2 * torch.randn(2, 9, 32)
    with quest_core.Monitor(layer) as monitor:
        layer(x)
    q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    _, weights, logits = layer.mechanism.forward_with_logits(q, k, v)
    (maps,) = quest_core.attention_maps(layer, x).values()
    torch.testing.assert_close(maps, weights)
    (row,) = monitor.collect().values()
    torch.testing.assert_close(torch.as_tensor(row["max_logit"]).float().flatten(), logits.amax((0, 2, 3)))
    share = weights.abs() / weights.abs().sum(-1, keepdim=True)  # those of diff-v1 may be negative
    entropy = -(share * share.log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.as_tensor(row["entropy"]).float().flatten(), entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "alibi", "xsa"])
def test_a_host_that_writes_attention_out_says_what_it_cannot_do(name):
    class WritesOut(torch.nn.Module):
        def forward(self, x):
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return ((heads @ heads.mT / 8**0.5).softmax(-1) @ heads).transpose(1, 2).flatten(2)

    with pytest.raises(quest_core.UnsupportedError, match=f"'{name}' acts inside the host's own code"):
        quest_core.inject(WritesOut(), name, example=torch.randn(2, 9, 32))


@pytest.mark.parametrize("name", ["gate", "diff", "forget"])
def test_the_layers_input_comes_from_the_layer_or_is_missed(name):
    class Calls(torch.nn.Module):
        def forward(self, x):
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    x = torch.randn(2, 9, 32)
    with pytest.raises(quest_core.UnsupportedError, match="it reads the layer's input, which this host does not hand"):
        quest_core.inject(Calls(), name, example=x)
    q = torch.randn(2, 4, 9, 8)
    with pytest.raises(quest_core.UnsupportedError, match=f"'{name}' reads the layer's input; pass x"):
        quest_core.Mechanism(name, num_heads=4, head_dim=8)(q, q, q)
    with pytest.raises(quest_core.InputError, match=r"x has shape \[2, 9, 16\]; expected \[B, N, H·D\] = \[2, 9, 32\]"):
        quest_core.Mechanism(name, num_heads=4, head_dim=8)(q, q, q, x=x[..., :16])
    layer, drop_in = quest_core.Attention(32, 4, name), quest_core.MultiheadAttention(32, 4, attention=name)
    for module in (layer, drop_in):
        torch.nn.init.normal_(next(module.mechanism.parameters()))
    q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    want = layer.out_proj(layer.mechanism(q, k, v, x=x).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), want)
    cache = quest_core.Cache()
    if all(part.cached for part in layer.config.components):
        steps = [layer(x[:, i : i + 3], is_causal=True, cache=cache) for i in (0, 3, 6)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, is_causal=True))
    rows = x.transpose(0, 1)  # tokens first
    torch.testing.assert_close(drop_in(rows, rows, rows)[0], drop_in(rows, rows, rows, need_weights=False)[0])


@pytest.mark.parametrize("name", ["kscale", "fkn"])
def test_gradients_under_activation_checkpointing_are_those_without(name):
    """The backward pass computes the step once more, with the scale that the step had."""
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layer = quest_core.Attention(32, 4, name).train()
        for i in (1, 20):  # the second batch moves the scale
            x = i * torch.randn(2, 9, 32)
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        out.square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["xsa", "alibi", "forget"])
@pytest.mark.parametrize("tokens", [5, 9])
def test_what_needs_the_tokens_own_keys_refuses_another_sequence(name, tokens):
    with pytest.raises(quest_core.UnsupportedError, match=f"'{name}' cannot attend to another sequence"):
        quest_core.Attention(32, 4, name)(torch.randn(2, 5, 32), torch.randn(2, tokens, 32))


@pytest.mark.parametrize("name", ["xsa", "alibi"])
def test_more_queries_than_keys_are_refused(name):
    q, k, v = (torch.randn(1, 4, n, 8) for n in (4, 3, 3))
    with pytest.raises(
        quest_core.InputError, match=f"q has 4 tokens and k has 3; '{name}' needs those of one sequence"
    ):
        quest_core.Mechanism(name, num_heads=4, head_dim=8)(q, k, v)


@pytest.mark.parametrize("name", ["kscale", "fkn"])
def test_a_running_scale_moves_in_bfloat16(name):
    """A hundredth of a small difference is below its precision."""
    made = quest_core.Attention(32, 4, name).to(torch.bfloat16).mechanism.train()
    keys = F.normalize(torch.randn(1, 4, 9, 8), dim=-1).to(torch.bfloat16)
    for factor in (4, *[5] * 300):
        made(keys, keys * factor, keys)
    torch.testing.assert_close(made.score.running, torch.full((4,), 5.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["kscale", "fkn"])
def test_padding_does_not_count_for_a_running_scale(name):
    made = quest_core.Mechanism(name, num_heads=4, head_dim=8).train()
    q, k, v = torch.randn(3, 43, 4, 8)
    quest_core.attention_packed(q, 5 * F.normalize(k, dim=-1), v, made, cu_seqlens=torch.tensor([0, 40, 43]))
    torch.testing.assert_close(made.score.running, torch.full((4,), 5.0))
    assert made.score.steps == 1
    hidden = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    hidden[1, ..., 3:] = False
    keys = F.normalize(torch.randn(2, 4, 9, 8), dim=-1)
    made(keys, torch.where(hidden.mT, keys, 70 * keys), keys, attn_mask=hidden)
    torch.testing.assert_close(made.score.pending, torch.full((4,), 4.96))


def test_qk_clip_refuses_what_follows_the_product():
    for name, why in (("standard+softcap", "'softcap' changes logits"), ("quest-gain", "its score changes queries")):
        with pytest.raises(quest_core.ConfigError, match=why):
            quest_core.QKClip(quest_core.Attention(32, 4, name))


@pytest.mark.parametrize("name", ["ssmax", "kscale", "fkn"])
def test_logits_without_a_mask_are_refused_where_they_need_more_than_queries_and_keys(name):
    with pytest.raises(quest_core.UnsupportedError, match="no logits that queries and keys determine"):
        quest_core.Mechanism(name, num_heads=4, head_dim=8).logits(*torch.randn(2, 1, 4, 5, 8))


@pytest.mark.parametrize("name", ["kscale", "fkn"])
def test_a_running_scale_in_training_mode_takes_steps_of_decoding_and_overflows(name):
    layer = quest_core.Attention(32, 4, name).train()
    cache, mask = quest_core.Cache(), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., :1] = False
    with torch.no_grad():
        for begin, end in ((0, 2), (2, 4), (4, 5)):
            layer(torch.randn(2, end - begin, 32), is_causal=True, cache=cache, attn_mask=mask[..., :end])
    running, steps = layer.mechanism.score.running.clone(), layer.mechanism.score.steps.clone()
    q = torch.randn(2, 4, 5, 8)
    layer.mechanism(q, torch.where(torch.arange(5)[:, None] == 2, torch.inf, q), q)
    assert steps == layer.mechanism.score.steps == 3
    torch.testing.assert_close(layer.mechanism.score.pending, running, rtol=0.2, atol=0)


def test_pair_norm_names_values_of_another_width():
    q, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 3)
    with pytest.raises(quest_core.UnsupportedError, match="'pair-norm' has weights for heads of 8 features.* 3;"):
        quest_core.Mechanism("pair-norm", num_heads=4, head_dim=8)(q, q, v)
