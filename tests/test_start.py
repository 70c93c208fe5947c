"""`init` and `key_init`: the norms that queries and keys of a fresh model start with."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import encoder, same_state, unchanged
from torch import nn

import quest_core
from devtools.configs import with_start
from quest_core import MultiheadAttention
from quest_core.errors import CheckpointError, ConfigError
from quest_core.projections import init_norms


def norms(part, role):
    return part.projections.norms(part, part.head_sizes, role)


@given(
    spec=st.sampled_from(["quest", "elliptical-quest", "quest+sigmoid", "quest+gqa"]),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    bias=st.booleans(),
    init=st.floats(1e-3, 1e3),
    key_init=st.floats(1e-3, 1e3),
)
def test_expected_norms_are_those_asked_for(spec, groups, share, head_dim, bias, init, key_init):
    config = {"name": spec, "init": init, "key_init": key_init} | ({"kv_heads": groups} if "gqa" in spec else {})
    layer = quest_core.Attention(8, groups * share, config, head_dim=head_dim, bias=bias)
    assert norms(layer, "q").tolist() == pytest.approx([init] * groups * share, rel=1e-5)
    assert norms(layer, "k").tolist() == pytest.approx([key_init] * layer.kv_heads, rel=1e-5)


def test_the_expectation_is_that_of_layer_normed_inputs():
    torch.manual_seed(0)
    layer = quest_core.Attention(256, 4, "quest(init=6)")
    x = F.layer_norm(torch.randn(64, 50, 256), (256,))
    q = layer.q_proj(x).unflatten(-1, (4, 64))  # [B, N, H, D]
    assert q.square().sum(-1).mean().sqrt().item() == pytest.approx(6, rel=0.03)


def test_only_the_lengths_of_heads_change():
    torch.manual_seed(0)
    plain = quest_core.Attention(32, 4, "quest")
    torch.manual_seed(0)
    started = quest_core.Attention(32, 4, "quest(init=5)")
    for name, value in plain.state_dict().items():
        if name.startswith("q_proj"):
            factor = (5 / norms(plain, "q")).repeat_interleave(8).float()
            factor = factor[:, None] if value.dim() == 2 else factor
            torch.testing.assert_close(started.state_dict()[name], value * factor)
        elif name != "mechanism.attention_is_not_standard":
            assert torch.equal(started.state_dict()[name], value)


def test_qnorm_counts_on_its_keys():
    layer = quest_core.Attention(32, 4, "qnorm(init=5, query_init=2)")
    assert norms(layer, "k").tolist() == pytest.approx([5] * 4)
    assert norms(layer, "q").tolist() == pytest.approx([2] * 4)


def test_without_the_options_nothing_changes():
    torch.manual_seed(0)
    stock = encoder(32)
    before = copy.deepcopy(stock.state_dict())
    model, report = quest_core.inject(stock, "quest", fresh=True)
    assert len(report.replacements[0].query_norms) == 4
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_model_that_may_be_trained_is_refused_untouched():
    model = encoder(32)
    said = r"quest\(init=5\.0\).*fresh=True.*calibrate"
    with unchanged(model), pytest.raises(ConfigError, match=said):
        quest_core.inject(model, "quest(init=5)")


@pytest.mark.parametrize("attention_from", [None, "standard"])
def test_trained_weights_of_another_attention_are_refused(attention_from):
    """They would stay as they are, and the option would do nothing."""
    model, _ = quest_core.inject(encoder(32), "quest(init=12)", fresh=True, attention_from=attention_from)
    said = r"sets the norms of new projections.*leave the option out"
    with same_state(model), pytest.raises(CheckpointError, match=said):
        model.load_state_dict(encoder(32).state_dict())
    model.load_state_dict(quest_core.inject(encoder(32), "quest")[0].state_dict())  # of a run with or without it


def test_a_shared_projection_is_scaled_once():
    layers = nn.ModuleList(MultiheadAttention(32, 4, attention="quest(init=7)") for _ in range(2))
    layers[1].in_proj_weight = layers[0].in_proj_weight
    with torch.no_grad():
        layers[0].in_proj_weight.normal_()
    for _ in range(2):
        init_norms(layers)
        assert norms(layers[1], "q").tolist() == pytest.approx([7.0] * 4)


def test_a_function_has_no_start():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ConfigError, match="a Mechanism does not have"):
        quest_core.attention(q, q, q, "quest(init=5)")


def test_a_reset_starts_again():
    layer = MultiheadAttention(32, 4, attention="quest(init=5)")
    layer._reset_parameters()
    assert norms(layer, "q").tolist() == pytest.approx([5] * 4)
    empty = MultiheadAttention(32, 4, attention="quest(init=5)", device="meta").to_empty(device="cpu")
    empty._reset_parameters()
    assert norms(empty, "q").tolist() == pytest.approx([5] * 4)


@pytest.mark.parametrize("spec", ["qknorm", "qknorm-hs", "quest+dgqa(kv_heads=2)"])
def test_a_reset_starts_what_a_mechanism_learns_and_keeps(spec):
    """Hosts reset their layers between the folds of a cross-validation, and after `to_empty`."""
    layer, fresh = (MultiheadAttention(32, 4, attention=spec) for _ in range(2))
    own = list(layer.mechanism.parameters())
    for x in layer.state_dict().values():
        x.fill_(7)
    layer._reset_parameters()
    for name, x in fresh.mechanism.state_dict().items():
        assert torch.equal(layer.mechanism.state_dict()[name], x), name
    assert all(x is y for x, y in zip(own, layer.mechanism.parameters(), strict=True))


def test_the_report_says_where_queries_start():
    _, report = quest_core.inject(encoder(32), "quest(init=5)", fresh=True)
    assert "queries start with norms 5 to 5" in str(report)
    head, *lines = report.table().splitlines()
    assert all(line[head.index("‖q‖") :].split()[0] == "5" for line in lines)
    assert "norm" not in str(quest_core.inject(encoder(32), "quest")[1])


@pytest.mark.parametrize(("optimizer", "power"), [(torch.optim.SGD, 2), (torch.optim.Adam, 1)])
def test_longer_key_projections_turn_more_slowly(optimizer, power):
    """docs/start.md: a step turns keys in proportion to 1/‖W_k‖² with SGD and 1/‖W_k‖ with Adam."""
    x = torch.randn(8, 10, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = []
    for norm in (1.0, 4.0):
        torch.manual_seed(0)
        layer = quest_core.Attention(32, 4, f"quest(key_init={norm})", bias=False, dtype=torch.float64)
        before = F.normalize(layer.k_proj(x).unflatten(-1, (4, 8)).detach(), dim=-1)
        layer(x).square().sum().backward()
        optimizer([layer.k_proj.weight], lr=1e-6).step()
        after = F.normalize(layer.k_proj(x).unflatten(-1, (4, 8)).detach(), dim=-1)
        turned.append((after - before).norm().item())
    assert turned[0] / turned[1] == pytest.approx(4**power, rel=1e-3)


# --- what configs offer -----------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
SAID = re.compile(r"^[^#]*\battention(?:: |=)(\"[^\"]*\"|dict\([^()]*\)|[^\s\"']+)", re.MULTILINE)
CONFIGS = [
    path
    for path in sorted(ROOT.glob("plugins/quest-*/src/*/configs/**/*"))
    if path.suffix in (".yaml", ".py") and any("quest" in said for said in SAID.findall(path.read_text()))
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_config_of_quest_offers_the_same_attention_with_a_start(path):
    """The tests of each plugin build the models."""
    before, after = (
        quest_core.AttentionConfig.parse(eval(said) if said.startswith(('"', "dict(")) else said)
        for text in (path.read_text(), with_start(path))
        for said in SAID.findall(text)
    )
    assert (after.name, dict(after.options)) == (before.name, {**dict(before.options), "init": 12})
